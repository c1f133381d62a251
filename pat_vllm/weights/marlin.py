"""Linear layers with fp8 weights in Marlin's tiles.

vLLM runs fp8 weights so on GPUs without fp8, of compute capability 8.0 and 8.6 (A100, A40). Its
processing packs a matrix of N rows and K columns into int32 `[K / 16, 4 N]`: 256 elements for each
tile of 64 rows and 16 columns. Of scales it makes `[1, N]`, one for each row, or `[K / 128, N]`,
one for each row in 128 columns, in 16 bits. These and a bias it orders anew within 64 rows or 32.
So where a shard consists of whole tiles, its tensors are parts of the base layout's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

from torch import nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_padded_nk

from pat_vllm.kernels.column_blocks import bands_of
from pat_vllm.layout import Place
from pat_vllm.weights.fp8 import STATIC, Fp8Linear, check_shards, kernel_of
from pat_vllm.weights.shards import Cut, TiledPartition
from pat_vllm.weights.weight import WHOLE, Weight

_ROWS, _COLUMNS = 64, 16
"""Of a tile."""
_ELEMENTS = _ROWS * _COLUMNS // 4
"""Of a tile, each with four weights."""


class MarlinFp8Linear(Fp8Linear):
    """A linear layer that vLLM's Marlin kernel runs, which takes strides from shapes.

    A part of the columns is a range of `weight`'s first dimension. A part of the rows is a range of
    its second one, which has to come together in a block.
    """

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Self | None:
        if type(kernel_of(module)).__name__ != "MarlinFP8ScaledMMLinearKernel":
            return None
        return super().of(path, module)

    def check(self, places: Iterable[Place]) -> None:
        places = list(places)
        # vLLM pads what has less than a multiple of 64 in either direction.
        check_shards(self.path, self.cuts, max(self.unit, _ROWS), places)
        for place in places if self.cuts else ():
            if reason := self._why_not_shared(place):
                rows, columns = self._sizes(place)
                raise ValueError(
                    f"{self.path} has {rows} x {columns} weights for tp={place.tp}, {reason}: "
                    f"layouts cannot share them in Marlin's tiles. Leave tp={place.tp} out by "
                    f"pat.layouts, {STATIC}"
                )

    def weights(self) -> Iterator[Weight]:
        for name, parameter in self.parameters().items():
            data = parameter.data
            own: list[Cut] = []
            for cut in self.cuts:
                if cut.dim == 0:
                    unit, length = _ROWS, _ELEMENTS if name == "weight" else _ROWS
                elif name == "weight":
                    unit, length = _COLUMNS, 1
                elif data.dim() == 2 and self.unit > 1:
                    unit, length = self.unit, 1
                else:
                    continue  # one for each row
                dim = data.dim() - 1 - cut.dim
                own.append(Cut(TiledPartition(cut.partition, dim, unit, length), cut.experts))
            yield Weight(
                f"{self.path}.{name}",
                data,
                tuple(own),
                self.place if own else WHOLE,
                self.module,
                name,
                "block" if name == "weight" else "copy",
            )

    def _why_not_shared(self, place: Place) -> str | None:
        (rows, columns), (all_rows, all_columns) = self._sizes(place), self._sizes(self.place)
        if (rows, columns) != marlin_padded_nk(rows, columns, self.unit if self.unit > 1 else -1):
            return "which vLLM pads"
        if self.unit > 1 and (columns > self.unit) != (all_columns > self.unit):
            return f"whose scales vLLM orders otherwise than of more than {self.unit} columns"
        if rows < all_rows and (all_columns // _COLUMNS) % (n := bands_of(all_rows, rows)):
            return f"whose {all_columns} columns are no multiple of {_COLUMNS} x {n}"
        return None

    def _sizes(self, place: Place) -> tuple[int, int]:
        """Rows and columns of a rank's shard there."""
        sizes = [self.module.output_size_per_partition, self.module.input_size_per_partition]
        for cut in self.cuts:
            sizes[cut.dim] = cut.shard(place).size
        return sizes[0], sizes[1]


def refuse_absorbed(path: str, attention: MLAAttention) -> None:
    """Refuse latent attention whose `kv_b_proj` is in Marlin's tiles.

    vLLM runs that layer at start for the matrices that it multiplies queries and outputs with. In
    the base layout's storage another layout's part does not lie together by then.

    Raises:
        ValueError: it is.
    """
    if MarlinFp8Linear.of(f"{path}.kv_b_proj", attention.kv_b_proj) is not None:
        raise ValueError(
            f"{path} makes its weights of fp8 in Marlin's tiles, of which PAT cannot derive those "
            f"of other layouts: use a checkpoint in 16 bits, a GPU that has fp8, {STATIC}"
        )
