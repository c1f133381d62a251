"""What a model's weights, KV and steps take on one rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pat_vllm.layer_sizes import size_of
from pat_vllm.layout import Layout
from pat_vllm.model_size import ModelSize

SWAP_CHUNK_BYTES = 64 << 10
"""Bytes that one row of a table of swaps moves (`kernels/swap.py`)."""
_SWAP_ROW_BYTES = 3 * 8
_SWAPPED = 0.25
"""Share of the rows of fused matrices that trade places between two layouts, about."""


@dataclass(frozen=True)
class ModelShape(ModelSize):
    """The sizes of a model that memory depends on.

    Attributes:
        max_positions: rows of the table of rotary embeddings.
        dtype_bytes: of an element of weights, activations and the KV cache.
    """

    max_positions: int
    dtype_bytes: int = 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype_bytes: int = 2) -> ModelShape:
        """From the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: as `ModelSize.of`.
        """
        return cls(
            **vars(ModelSize.of(config)),
            max_positions=size_of(config, "max_position_embeddings"),
            dtype_bytes=dtype_bytes,
        )

    def weight_bytes(self, tp: int, spread: bool = False) -> int:
        """A rank's shard of all weights but norms and biases; of the rank that has most.

        Args:
            spread: a mixture's experts lie whole on the ranks; else each is cut.
        """
        return int(self.resident_weights(tp, spread) * self.dtype_bytes)

    @property
    def rotary_bytes(self) -> int:
        """The table of rotary embeddings, of which a process has one."""
        width = self.head_dim if self.latent is None else self.latent.rope
        return self.max_positions * width * self.dtype_bytes

    def swap_table_bytes(self, layouts: Sequence[Layout]) -> int:
        """Tables of the rows that trade places between any two layouts, about.

        They lie on the device, with weights in place.
        """
        base, *others = dict.fromkeys(layout.tp for layout in layouts)
        fused = 0  # of latent attention nothing that is cut is fused
        if self.latent is None:
            queries = (1 + self.gated) * self.heads
            fused = (queries + 2 * self.kv_heads) // base * self.head_dim * self.attention_layers
        if self.linear is not None and self.linear.apart:
            fused += self.linear.rows // base * self.linear.layers
        if not self.mlps:
            fused += 2 * self.intermediate // base * self.dense_layers
        if (one := self.experts) is not None:
            held = one.most_on_rank(base) if layouts[0].experts == "ep" else one.count / base
            fused += int(one.layers * 2 * (one.intermediate * held + one.shared / base))
        chunks = fused * self.hidden * self.dtype_bytes / SWAP_CHUNK_BYTES
        pairs = len(others) * (len(others) + 1)
        return int(pairs * _SWAPPED * chunks * _SWAP_ROW_BYTES)

    def kv_bytes_per_token(self, tp: int) -> int:
        """KV of one token, over all layers, on a rank; heads are replicated where they are few."""
        return self.attention_layers * self.kv_elements(tp) * self.dtype_bytes

    def latent_workspace_bytes(self, max_model_len: int, max_num_seqs: int, block_size: int) -> int:
        """Latent vectors of earlier parts of prompts, as vLLM gathers them for a step; else 0.

        As `MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size`.
        """
        if self.latent is None:
            return 0
        tokens = max(8 * max_model_len, 4 * max_num_seqs * block_size)
        return min(tokens, 64 << 10) * self.kv_elements(1) * self.dtype_bytes

    def state_bytes(self, tp: int) -> int:
        """What a request has on a rank beside its KV, over all layers with linear attention."""
        if self.linear is None:
            return 0
        return self.linear.layers * self.linear.state_bytes(self.dtype_bytes) // tp

    def block_size(self, base_tp: int, block_size: int) -> int:
        """Tokens of a KV block, in every layout: as many as make it as large as a state.

        As vLLM's `_align_hybrid_block_size` for the base layout.

        Args:
            block_size: that the engine is given, of which it is a multiple.
        """
        if self.linear is None:
            return block_size
        state = self.linear.state_bytes(self.dtype_bytes) // base_tp
        of_token = self.kv_bytes_per_token(base_tp) // self.attention_layers
        return -(-state // (block_size * of_token)) * block_size

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
        if (latent := self.latent) is not None:
            # Queries, keys and values, the parts that keys are put together of, and the output.
            of_head = 2 * latent.query + 2 * latent.value + latent.nope
            attention = 2 * self.hidden + self.heads // tp * of_head
        if self.linear is not None:
            attention = max(attention, 2 * self.hidden + 2 * self.linear.rows // tp)
        layer = tokens * max(mlp, attention) * self.dtype_bytes
        # As the model gives them, in float32, and what sampling makes of these.
        logits = seqs * self.vocab * (self.dtype_bytes + 4 + 4)
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
