"""What a model's weights, KV and steps take on one rank. Pure.

Of decoder-only models with gated MLPs and full attention (Llama, Qwen2, Qwen3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from pat_vllm.layout import Layout
from pat_vllm.model_size import ModelSize
from pat_vllm.weights.row_order import RowOrder, block_of, common_unit
from pat_vllm.weights.shards import EvenPartition, Partition, QKVPartition, pieces_of

_VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of it."""
SWAP_CHUNK_BYTES = 64 << 10
"""Bytes that one row of a table of swaps moves (`kernels/swap.py`)."""
_SWAP_ROW_BYTES = 3 * 8


@dataclass(frozen=True)
class ModelShape(ModelSize):
    """The sizes of a model that memory depends on.

    Attributes:
        max_positions: rows of the table of rotary embeddings.
        dtype_bytes, kv_dtype_bytes: of an element of weights and activations, and of the KV cache.
        qk_norm: queries and keys are normalised per head (Qwen3).
        qkv_bias: q, k and v have biases (Qwen2).
    """

    max_positions: int
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    qk_norm: bool = False
    qkv_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype_bytes: int = 2) -> ModelShape:
        """From the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: it is no dense decoder's.
        """
        kind = config["model_type"]
        return cls(
            **vars(ModelSize.of(config)),
            max_positions=config["max_position_embeddings"],
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=dtype_bytes,
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
        )

    # ---------------------------------------------------------------- weights

    def weight_bytes(self, tp: int) -> int:
        """A rank's shard of all weights."""
        q = self.heads // tp * self.head_dim
        kv = self._kv_heads_per_rank(tp) * self.head_dim
        of_layer = self.hidden * (q + 2 * kv) + q * self.hidden
        of_layer += 3 * self.hidden * self.intermediate // tp
        of_layer += 2 * self.hidden
        of_layer += 2 * self.head_dim * self.qk_norm + (q + 2 * kv) * self.qkv_bias
        matrices = 1 if self.tied else 2
        outside = matrices * self._padded_vocab // tp * self.hidden + self.hidden
        return (self.layers * of_layer + outside) * self.dtype_bytes

    @property
    def rotary_bytes(self) -> int:
        """The table of rotary embeddings, of which a process has one."""
        return self.max_positions * self.head_dim * self.dtype_bytes

    def swap_table_bytes(self, layouts: Sequence[Layout]) -> int:
        """Tables of the rows that trade places between any two layouts, of the rank that has most.

        They lie on the device, with weights in place.
        """
        qkv = QKVPartition(self.heads, self.kv_heads, self.head_dim, self.head_dim)
        gate_up = EvenPartition((self.intermediate, self.intermediate))
        row_bytes = self.hidden * self.dtype_bytes
        return max(
            sum(
                self.layers * -(-length * row_bytes // SWAP_CHUNK_BYTES) * _SWAP_ROW_BYTES
                for partition in (qkv, gate_up)
                for length in _swapped(partition, layouts, rank)
            )
            for rank in range(layouts[0].world_size)
        )

    # ---------------------------------------------------------------- KV and steps

    def kv_bytes_per_token(self, tp: int) -> int:
        """KV of one token, over all layers, on a rank."""
        values = 2 * self.layers * self._kv_heads_per_rank(tp) * self.head_dim
        return values * self.kv_dtype_bytes

    def step_bytes(self, tp: int, tokens: int, seqs: int) -> int:
        """Activations of the largest step, about: the widest layer, or the logits.

        Args:
            tokens: of the step.
            seqs: requests that are sampled for.
        """
        mlp = 2 * self.hidden + 3 * self.intermediate // tp
        attention = 2 * self.hidden + 2 * (self.heads + self.kv_heads) // tp * self.head_dim
        layer = tokens * max(mlp, attention) * self.dtype_bytes
        # As the model gives them, in float32, and what sampling makes of these.
        logits = seqs * self._padded_vocab * (self.dtype_bytes + 4 + 4)
        return max(layer, logits + tokens * self.hidden * self.dtype_bytes)

    @property
    def _padded_vocab(self) -> int:
        return -(-self.vocab // _VOCAB_PADDING) * _VOCAB_PADDING

    def _kv_heads_per_rank(self, tp: int) -> int:
        return max(1, self.kv_heads // tp)


def _swapped(partition: Partition, layouts: Sequence[Layout], rank: int) -> list[int]:
    """Lengths of the swaps of rows between every two layouts, of a rank's shard."""
    tp_ranks = {layout.tp: layout.tp_rank_of(rank) for layout in layouts}
    base_tp = layouts[0].tp
    base = partition.shard(base_tp, tp_ranks[base_tp])
    pieces = {tp: pieces_of(partition.shard(tp, at), base) for tp, at in tp_ranks.items()}
    unit = common_unit(base.size, pieces.values())
    original = RowOrder.original(base.size, unit)
    orders = {tp: original.bring(block_of(one, base.size, unit)) for tp, one in pieces.items()}
    return [
        swap.length
        for source, target in permutations(orders.values(), 2)
        for swap in source.swaps_to(target)
    ]
