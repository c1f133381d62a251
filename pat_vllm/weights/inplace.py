"""One copy of the weights for all layouts: rows of the base layout's storage change places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, permutations

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pat_vllm.kernels.column_blocks import ColumnBlock, gather, scatter
from pat_vllm.kernels.swap import ByteSwaps, RowSwap, prepare
from pat_vllm.layout import Experts, Layout
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.weights.loaders import WeightStrategy
from pat_vllm.weights.model_weights import matching_weights, quantized_layers
from pat_vllm.weights.quantized import QuantizedLayer
from pat_vllm.weights.row_order import Block, RowOrder, block_of, common_unit, rounds
from pat_vllm.weights.shards import Cut, pieces_of
from pat_vllm.weights.weight import Weight, derive

_SMALL = 256 << 10
"""Parameters of at most so many bytes keep their memory until their model is made. Weights of
convolutions are so small, and get their shape only after the next parameters are there."""


class InPlaceShards(WeightStrategy):
    """The weights of the other layouts are views of the base layout's.

    A layout's shard of a row-parallel matrix is a range of columns. Its shard of a column-parallel
    matrix is a block of rows; where the matrix is a fused one, `arrange` brings the rows together.
    A layout's shard of fused experts is a range of the experts, or such a block or such a range of
    each expert. Ranges of columns, too, come together in a block for kernels that need it so.
    A view's address never changes, so that compiled code and CUDA graphs may keep it. The few small
    weights whose shards are not nested (see `Partition`), and scales, are copies.

    At most one layout's blocks are together at a time. New weights may only be written while that
    is the base layout.

    Args:
        layouts: the base layout first, whose shards must contain those of the others (see
            `Layout`).
        rank: the global rank whose weights these are.
        experts: how the experts of a mixture lie.
    """

    def __init__(self, layouts: Sequence[Layout], rank: int, experts: Experts = "tp") -> None:
        self._places = {layout: layout.place_of(rank, experts) for layout in layouts}
        self._base_layout = layouts[0]
        self._base: dict[str, Weight] = {}
        self._views: list[tuple[Weight, torch.Tensor]] = []
        self._copies: list[tuple[Weight, Weight]] = []
        self._blocks: dict[Cut, dict[int, Block]] = {}
        """Where layouts find their shards, by cut and `Cut.ways`."""
        self._moves: dict[tuple[Layout, Layout], ByteSwaps] = {}
        self._columns: dict[Layout, list[ColumnBlock]] = {}
        """Columns that are together while a layout is arranged, of each matrix."""
        self._quantized: dict[str, QuantizedLayer] = {}
        """The base layout's layers with quantized weights."""
        self._has_quantized = False
        self._arranged = self._base_layout

    # ---------------------------------------------------------------- start

    def check(self, model: nn.Module) -> None:
        super().check(model)
        for layer in quantized_layers(model).values():
            layer.check(self._places.values())

    def capture(self, model: nn.Module) -> None:
        keep_plain_weights(model)
        self._quantized = quantized_layers(model)
        self._take(self.kept_weights(model))

    def keep(self, modules: Collection[nn.Module]) -> None:
        self._base = self._kept(self._base, modules)

    def _take(self, weights: Iterable[Weight]) -> None:
        """Share weights of the base layout."""
        for weight in weights:
            self._base[weight.name] = weight
            for cut in weight.cuts if weight.share != "copy" else ():
                if cut.partition.nested and cut not in self._blocks:
                    self._blocks[cut] = self._blocks_of(cut, weight)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, give the memory of each parameter back when the next one is registered. Until
        then, its module may still give it another shape."""
        last: nn.Parameter | None = None
        small: list[nn.Parameter] = []

        def give_back(module: object, name: object, parameter: nn.Parameter | None) -> None:
            nonlocal last
            if last is not None:
                last.untyped_storage().resize_(0)
            last = parameter
            if last is not None and last.nbytes <= _SMALL:
                small.append(last)
                last = None

        handle = register_module_parameter_registration_hook(give_back)
        try:
            yield
        finally:
            handle.remove()
            give_back(None, None, None)
            for parameter in small:
                parameter.untyped_storage().resize_(0)

    def fill(self, model: nn.Module) -> None:
        """Make each weight a view of the base layout's, or a copy."""
        if not self._has_quantized:  # vLLM has processed the base layout's weights by now
            self._has_quantized = True
            self._take(chain.from_iterable(layer.weights() for layer in self._quantized.values()))
        keep_plain_weights(model)
        layers = quantized_layers(model)
        for path, layer in layers.items():
            layer.adopt(self._quantized[path])
        quantized = chain.from_iterable(layer.weights() for layer in layers.values())
        for weight, base in matching_weights(
            chain(self.kept_weights(model), quantized), self._base
        ):
            if weight.shared:
                view = self._view(weight, base)
                weight.bind(view)
                self._views.append((weight, view))
            else:
                tensor = weight.tensor
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                own = replace(weight, tensor=tensor)
                own.bind(tensor)
                derive(own, base)
                self._copies.append((own, base))

    def release(self) -> None:
        copied = (weight for weight, _ in self._copies)
        bound = [(weight, weight.tensor) for weight in [*self._base.values(), *copied]]
        for weight, view in [*bound, *self._views]:
            if weight.current.data_ptr() != view.data_ptr():
                raise ValueError(
                    f"vLLM has packed {weight.name} for its kernels, so that the layouts cannot "
                    "share it: set pat.weights='materialized' (and pat.experts='tp')"
                )
            if weight.share == "block" and not weight.current.is_contiguous():
                raise ValueError(f"{weight.name} has gaps, which its kernel would not see")
        # Prepared at start: that takes longer than to run them, and a switch would wait for it.
        self._moves = {
            (source, target): self._move(source, target)
            for source, target in permutations(self._places, 2)
        }

    def _blocks_of(self, cut: Cut, weight: Weight) -> dict[int, Block]:
        """Where each layout finds its shard of weights with this cut, by `Cut.ways`.

        Args:
            weight: such a weight of the base layout.
        """
        padded, rows = cut.padded(), weight.tensor.shape[cut.dim]
        base = padded.shard(self._places[self._base_layout])
        pieces = {
            cut.ways(place): pieces_of(padded.shard(place), base) for place in self._places.values()
        }
        unit = common_unit(rows, pieces.values())
        banded = weight.share == "block" and cut.dim > 0
        return {ways: block_of(own, rows, unit, banded) for ways, own in pieces.items()}

    def _view(self, weight: Weight, base: Weight) -> torch.Tensor:
        """The part of `base` in which `weight` lies while its layout is arranged."""
        view = base.tensor
        for cut in weight.cuts:
            if cut in self._blocks:
                block = self._blocks[cut][cut.ways(weight.place)]
                if base.share == "block" and cut.dim and block.size < view.shape[cut.dim]:
                    layout = next(at for at in self._places if at.tp == weight.place.tp)
                    columns = ColumnBlock(view, block.start, block.size)
                    self._columns.setdefault(layout, []).append(columns)
                    view = columns.block
                else:
                    view = view.narrow(cut.dim, block.start, block.size)
        return view

    # ---------------------------------------------------------------- afterwards

    def arrange(self, layout: Layout) -> int:
        """Swap rows until the shards of `layout` are together; on a GPU, in the current stream."""
        if layout == self._arranged:
            return 0
        move = self._moves[self._arranged, layout]
        num_bytes = move.num_bytes
        if columns := self._columns.get(self._arranged):
            num_bytes += scatter(columns)
        move.run()
        if columns := self._columns.get(layout):
            num_bytes += gather(columns)
        self._arranged = layout
        return num_bytes

    @property
    def staging_bytes(self) -> int:
        return max((c.block.nbytes for c in chain(*self._columns.values())), default=0)

    def refresh(self, base: nn.Module, others: Iterable[nn.Module]) -> None:
        """Copy parameters that an update has replaced into the shared storage; renew the copies."""
        for weight in self._base.values():
            new = weight.current
            if new.data_ptr() != weight.tensor.data_ptr():
                assert self._arranged == self._base_layout, "new weights came to another layout"
                weight.tensor.copy_(new)
                weight.bind(weight.tensor)
        for weight, of_base in self._copies:
            derive(weight, of_base)

    def _move(self, source: Layout, target: Layout) -> ByteSwaps:
        """The swaps that lead from the order of one layout to that of another."""
        swaps_of = {
            cut: rounds(self._order(cut, source).swaps_to(self._order(cut, target)))
            for cut in self._blocks
        }
        row_swaps: list[list[RowSwap]] = []
        seen: set[int] = set()
        for weight in self._base.values():
            if weight.storage in seen:
                continue
            seen.add(weight.storage)  # tied weights have one storage, whose rows move once
            for cut in weight.cuts if weight.share != "copy" else ():
                for i, swaps in enumerate(swaps_of.get(cut, ())):
                    if i == len(row_swaps):
                        row_swaps.append([])
                    row_swaps[i] += [
                        RowSwap(weight.tensor, swap.a, swap.b, swap.length, cut.dim)
                        for swap in swaps
                    ]
        return prepare(row_swaps)

    def _order(self, cut: Cut, layout: Layout) -> RowOrder:
        """The order of rows while `layout` is arranged, in the storage of weights with this cut."""
        base, own = (
            self._blocks[cut][cut.ways(self._places[either])]
            for either in (self._base_layout, layout)
        )
        return RowOrder.original(base.size, base.unit).bring(own)
