"""One copy of the weights for all layouts: rows of the base layout's storage change places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import permutations

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pat_vllm.kernels.swap import ByteSwaps, RowSwap, prepare
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.weights.model_weights import Weight, matching_weights, model_weights
from pat_vllm.weights.row_order import Block, RowOrder, block_of, common_unit, rounds
from pat_vllm.weights.shards import Partition, pieces_of


class InPlaceShards:
    """The weights of the other layouts are views of the base layout's.

    A layout's shard of a row-parallel matrix is a range of columns. Its shard of a column-parallel
    matrix is a block of rows; where the matrix is a fused one, `arrange` brings the rows together.
    A view's address never changes, so that compiled code and CUDA graphs may keep it.

    At most one layout's blocks are together at a time. New weights may only be written while that
    is the base layout.

    Args:
        tp_ranks: this rank's position in the TP group of each layout, by tp; the base layout first,
            whose shard must contain those of the others (see `Layout`).
    """

    def __init__(self, tp_ranks: Mapping[int, int]) -> None:
        self._tp_ranks = dict(tp_ranks)
        self._base_tp = next(iter(tp_ranks))
        self._base: dict[str, Weight] = {}
        self._views: list[tuple[Weight, torch.Tensor]] = []
        self._blocks: dict[Partition, dict[int, Block]] = {}
        self._moves: dict[tuple[int, int], ByteSwaps] = {}
        self._arranged = self._base_tp

    # ---------------------------------------------------------------- start

    def check(self, model: nn.Module) -> None:
        """See `WeightStrategy`."""
        for _ in model_weights(model):
            pass

    def capture(self, model: nn.Module) -> None:
        """See `WeightStrategy`."""
        keep_plain_weights(model)
        self._base = {weight.name: weight for weight in model_weights(model)}
        for weight in self._base.values():
            cut = weight.partition
            if cut is not None and cut.dim == 0 and cut not in self._blocks:
                self._blocks[cut] = self._blocks_of(cut, len(weight.tensor))

    @contextmanager
    def building(self) -> Iterator[None]:
        """See `WeightStrategy`. Gives the memory of each parameter back as soon as it is made."""

        def give_back(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None:
                parameter.untyped_storage().resize_(0)

        handle = register_module_parameter_registration_hook(give_back)
        try:
            yield
        finally:
            handle.remove()

    def fill(self, model: nn.Module) -> None:
        """Make each weight a view of the base layout's.

        Raises:
            ValueError: the model's weights are not those of the base model cut another way.
        """
        keep_plain_weights(model)
        for weight, base in matching_weights(model, self._base):
            view = self._view(weight, base)
            weight.bind(view)
            self._views.append((weight, view))

    def release(self) -> None:
        """See `WeightStrategy`."""
        bound = [(weight, weight.tensor) for weight in self._base.values()]
        for weight, view in [*bound, *self._views]:
            if weight.current.data_ptr() != view.data_ptr():
                raise ValueError(
                    f"vLLM has packed {weight.name} for its kernels, so that the layouts cannot "
                    "share it: set pat.weights='materialized'"
                )
        # At start, because to work the moves out takes longer than to make them.
        self._moves = {
            (source, target): self._move(source, target)
            for source, target in permutations(self._tp_ranks, 2)
        }

    def _blocks_of(self, partition: Partition, rows: int) -> dict[int, Block]:
        """Where each layout finds its shard of matrices that are cut this way, by tp."""
        padded = partition.padded()
        base = padded.shard(self._base_tp, self._tp_ranks[self._base_tp])
        pieces = {tp: pieces_of(padded.shard(tp, at), base) for tp, at in self._tp_ranks.items()}
        unit = common_unit(rows, pieces.values())
        return {tp: block_of(of_tp, rows, unit) for tp, of_tp in pieces.items()}

    def _view(self, weight: Weight, base: Weight) -> torch.Tensor:
        if weight.partition is None:
            return base.tensor
        if weight.partition.dim == 0:
            block = self._blocks[weight.partition][weight.tp]
            return base.tensor.narrow(0, block.start, block.size)
        shard = weight.partition.shard(weight.tp, weight.tp_rank)
        (columns,) = pieces_of(shard, weight.partition.shard(base.tp, base.tp_rank))
        return base.tensor.narrow(weight.partition.dim, columns.src, columns.length)

    # ---------------------------------------------------------------- afterwards

    def arrange(self, tp: int) -> int:
        """See `WeightStrategy`. On a device it is queued in the current stream."""
        if tp == self._arranged:
            return 0
        move = self._moves[self._arranged, tp]
        move.run()
        self._arranged = tp
        return move.num_bytes

    def refresh(self, base: nn.Module, others: Iterable[nn.Module]) -> None:
        """See `WeightStrategy`. Where an update has replaced a parameter, takes its values over."""
        for weight in self._base.values():
            new = weight.current
            if new.data_ptr() != weight.tensor.data_ptr():
                assert self._arranged == self._base_tp, "new weights came to another layout"
                weight.tensor.copy_(new)
                weight.bind(weight.tensor)

    def _move(self, source: int, target: int) -> ByteSwaps:
        """The swaps that lead from the order of one layout to that of another."""
        swaps_of = {}
        for partition, blocks in self._blocks.items():
            base = blocks[self._base_tp]
            original = RowOrder.original(base.size, base.unit)
            before, after = (original.bring(blocks[tp]) for tp in (source, target))
            swaps_of[partition] = rounds(before.swaps_to(after))
        made: list[list[RowSwap]] = []
        seen: set[int] = set()
        for weight in self._base.values():
            if weight.partition not in swaps_of or weight.storage in seen:
                continue
            seen.add(weight.storage)  # of tied weights, one
            for i, swaps in enumerate(swaps_of[weight.partition]):
                if i == len(made):
                    made.append([])
                made[i] += [RowSwap(weight.tensor, one.a, one.b, one.length) for one in swaps]
        return prepare(made)
