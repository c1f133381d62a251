"""What a model's weights, KV and steps take on one rank. Pure.

Of decoder-only models with gated MLPs or experts and full attention (Llama, Qwen2, Qwen3, and the
`MIXTURES` of `model_size`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from pat_vllm.layout import Layout
from pat_vllm.model_size import ModelSize
from pat_vllm.weights.row_order import RowOrder, block_of, common_unit
from pat_vllm.weights.shards import Cut, EvenPartition, QKVPartition, pieces_of

_VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of it."""
SWAP_CHUNK_BYTES = 64 << 10
"""Bytes that one row of a table of swaps moves (`kernels/swap.py`)."""
_SWAP_ROW_BYTES = 3 * 8
_FLOAT32 = 4


@dataclass(frozen=True)
class ModelShape(ModelSize):
    """The sizes of a model that memory depends on.

    Attributes:
        max_positions: rows of the table of rotary embeddings.
        dtype_bytes, kv_dtype_bytes: of an element of weights and activations, and of the KV cache.
        rotary_dim: what of a head is rotated; a row of the table.
        qk_norm: queries and keys are normalised per head (Qwen3).
        wide_qk_norm: they are normalised over all heads (OLMoE).
        qkv_bias: q, k and v have biases (Qwen2).
        exact_router: routers are in float32 and have a bias of their choice (GLM-4-MoE).
    """

    max_positions: int
    rotary_dim: int
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    qk_norm: bool = False
    wide_qk_norm: bool = False
    qkv_bias: bool = False
    exact_router: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype_bytes: int = 2) -> ModelShape:
        """From the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: it is another kind of model's.
        """
        kind, size = config["model_type"], ModelSize.of(config)
        glm, rotated = kind == "glm4_moe", 1.0
        if glm:
            rope = config.get("rope_parameters") or config
            rotated = rope.get("partial_rotary_factor") or 0.5
        biased = kind in ("qwen3_moe", "glm4_moe") and config.get("attention_bias")
        return cls(
            **vars(size),
            max_positions=config["max_position_embeddings"],
            rotary_dim=int(size.head_dim * rotated),
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=dtype_bytes,
            qk_norm=kind in ("qwen3", "qwen3_moe") or bool(glm and config.get("use_qk_norm")),
            wide_qk_norm=kind == "olmoe",
            qkv_bias=kind in ("qwen2", "qwen2_moe") or bool(biased),
            exact_router=glm,
        )

    # ---------------------------------------------------------------- weights

    def weight_bytes(self, tp: int, spread: bool = False) -> int:
        """A rank's shard of all weights; of the rank that has most.

        Args:
            spread: a mixture's experts lie whole on the ranks; else each is cut.
        """
        q = self.heads // tp * self.head_dim
        kv = self._kv_heads_per_rank(tp) * self.head_dim
        of_layer = self.hidden * (q + 2 * kv) + q * self.hidden
        of_layer += 2 * self.hidden
        of_layer += 2 * self.head_dim * self.qk_norm + (q + 2 * kv) * self.qkv_bias
        of_layer += (self.heads + self.kv_heads) * self.head_dim * self.wide_qk_norm
        of_all = self.layers * of_layer + self.dense_layers * self._mlp(self.intermediate, tp)
        matrices = 1 if self.tied else 2
        outside = matrices * self._padded_vocab // tp * self.hidden + self.hidden
        return (of_all + outside) * self.dtype_bytes + self._expert_bytes(tp, spread)

    def _expert_bytes(self, tp: int, spread: bool) -> int:
        """Of a mixture: a rank's experts, shared ones and routers."""
        if self.experts is None:
            return 0
        one = self.experts
        of_layer = self._mlp(one.shared, tp) + self.hidden * one.shared_gate
        if spread:
            of_layer += one.most_on_rank(tp) * self._mlp(one.intermediate, 1)
        else:
            of_layer += one.count * self._mlp(one.intermediate, tp)
        router = self.hidden * one.count * self.dtype_bytes
        if self.exact_router:
            router = (self.hidden + 1) * one.count * _FLOAT32
        return one.layers * (of_layer * self.dtype_bytes + router)

    def _mlp(self, intermediate: int, tp: int) -> int:
        return 3 * self.hidden * intermediate // tp

    @property
    def rotary_bytes(self) -> int:
        """The table of rotary embeddings, of which a process has one."""
        return self.max_positions * self.rotary_dim * self.dtype_bytes

    def swap_table_bytes(self, layouts: Sequence[Layout]) -> int:
        """Tables of the rows that trade places between any two layouts, of the rank that has most.

        They lie on the device, with weights in place.
        """
        row_bytes = self.hidden * self.dtype_bytes
        return max(
            sum(
                count * -(-length * row_bytes // SWAP_CHUNK_BYTES) * _SWAP_ROW_BYTES
                for cut, count in self._row_cuts(layouts[0])
                for length in _swapped(cut, layouts, rank)
            )
            for rank in range(layouts[0].world_size)
        )

    def _row_cuts(self, base: Layout) -> list[tuple[Cut, int]]:
        """How fused matrices are cut by rows, and how many of each a rank has at base."""
        qkv = QKVPartition(self.heads, self.kv_heads, self.head_dim, self.head_dim)
        gate_up = EvenPartition((self.intermediate, self.intermediate))
        cuts = [(Cut(qkv), self.layers), (Cut(gate_up), self.dense_layers)]
        if (one := self.experts) is not None:
            expert = EvenPartition((one.intermediate, one.intermediate))
            held = one.most_on_rank(base.tp) if base.experts == "ep" else one.count
            cuts.append((Cut(expert, "tp"), one.layers * held))
            if one.shared:
                cuts.append((Cut(EvenPartition((one.shared, one.shared))), one.layers))
        return cuts

    # ---------------------------------------------------------------- KV and steps

    def kv_bytes_per_token(self, tp: int) -> int:
        """KV of one token, over all layers, on a rank."""
        values = 2 * self.layers * self._kv_heads_per_rank(tp) * self.head_dim
        return values * self.kv_dtype_bytes

    def step_bytes(self, tp: int, tokens: int, seqs: int) -> int:
        """Activations of the largest step, about: the widest layer, or the logits.

        What experts compute lies elsewhere (`expert_workspace_bytes`).

        Args:
            tokens: of the step.
            seqs: requests that are sampled for.
        """
        widths = [self.intermediate] * (self.dense_layers > 0)
        if self.experts is not None:
            widths.append(self.experts.shared)
        mlp = 2 * self.hidden + 3 * max(widths) // tp
        attention = 2 * self.hidden + 2 * (self.heads + self.kv_heads) // tp * self.head_dim
        layer = tokens * max(mlp, attention) * self.dtype_bytes
        # As the model gives them, in float32, and what sampling makes of these.
        logits = seqs * self._padded_vocab * (self.dtype_bytes + 4 + 4)
        return max(layer, logits + tokens * self.hidden * self.dtype_bytes)

    def expert_workspace_bytes(self, tp: int, spread: bool, tokens: int) -> int:
        """What vLLM's Triton experts compute in, for the largest step; 0 without experts.

        Each token has a row for each of its experts, wherever these lie: one that becomes the
        output, and one for gate and up.
        """
        if self.experts is None:
            return 0
        one = self.experts
        width = one.intermediate if spread else one.intermediate // tp
        rows = tokens * one.per_token
        return rows * (max(width, self.hidden) + max(2 * width, self.hidden)) * self.dtype_bytes

    @property
    def _padded_vocab(self) -> int:
        return -(-self.vocab // _VOCAB_PADDING) * _VOCAB_PADDING

    def _kv_heads_per_rank(self, tp: int) -> int:
        return max(1, self.kv_heads // tp)


def _swapped(cut: Cut, layouts: Sequence[Layout], rank: int) -> list[int]:
    """Lengths of the swaps of rows between every two layouts, of a rank's shard."""
    places = [layout.place_of(rank) for layout in layouts]
    base = cut.shard(places[0])
    pieces = [pieces_of(cut.shard(place), base) for place in places]
    unit = common_unit(base.size, pieces)
    original = RowOrder.original(base.size, unit)
    orders = [original.bring(block_of(one, base.size, unit)) for one in pieces]
    return [
        swap.length
        for source, target in permutations(orders, 2)
        for swap in source.swaps_to(target)
    ]
