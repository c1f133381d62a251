"""The sizes of models, from their config.json, and what they take on one rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.layer_sizes import (
    ExpertSizes,
    LatentSizes,
    LinearSizes,
    alone_in_layers,
    layers_of,
    layers_with_windows,
    size_of,
)
from pat_vllm.models.model_classes import known_class
from pat_vllm.models.quantization import PLAIN, Quantized

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of it."""
SWAP_CHUNK_BYTES = 64 << 10
"""Bytes that one row of a table of swaps moves (`kernels/swap.py`)."""
_SWAP_ROW_BYTES = 3 * 8
_SWAPPED = 0.25
"""Share of the rows of fused matrices that trade places between two layouts, about."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a decoder, counted in elements.

    Attributes:
        intermediate: width of the MLP, in layers without experts.
        experts: None: the decoder is dense.
        window: tokens to which a token attends in `window_layers` of the layers.
        latent: None: attention has heads of keys and values. With it `kv_heads` is 1, of all
            heads, and `head_dim` the width of a query.
        linear: None: every layer has attention.
        gated: whether queries come with gates of the output.
        mlps: layers that are an MLP and nothing more, of models whose other layers have none; 0:
            every layer has an MLP, or experts.
        mlp_gate: whether MLPs have a gate.
        max_positions: rows of the table of rotary embeddings.
        dtype_bytes: of an element of weights, activations and the KV cache.
        quantized: which of these elements have fewer.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    _: KW_ONLY
    experts: ExpertSizes | None = None
    window: int = 0
    window_layers: int = 0
    latent: LatentSizes | None = None
    linear: LinearSizes | None = None
    gated: bool = False
    mlps: int = 0
    mlp_gate: bool = True
    max_positions: int = 0
    dtype_bytes: int = 2
    quantized: Quantized = PLAIN

    @classmethod
    def of(
        cls, config: Mapping[str, Any], dtype_bytes: int = 2, quantized: Quantized = PLAIN
    ) -> ModelSize:
        """From the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: a size is missing or none, or the model's class is not known.
        """
        known, alone = known_class(config), alone_in_layers(config)
        experts, layers = ExpertSizes.of(config), layers_of(config)
        needed = ["hidden_size", "num_attention_heads", "vocab_size"]
        if alone is None:
            needed.append("num_hidden_layers")
        if experts is None or experts.layers < layers:
            needed.append("intermediate_size")
        if missing := [name for name in needed if not config.get(name)]:
            raise ValueError(
                f"the model's config has no {', '.join(missing)} (shapes at hand: "
                f"{', '.join(MODEL_SHAPES)})"
            )
        latent = LatentSizes.of(config)
        linear = LinearSizes.of(config)
        if linear is not None and linear.layers >= layers:
            raise ValueError(
                "the model's config has linear attention in all layers: only models that have "
                "attention in some can be modelled"
            )
        heads, hidden = size_of(config, "num_attention_heads"), size_of(config, "hidden_size")
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=1 if latent else size_of(config, "num_key_value_heads") or heads,
            head_dim=latent.query
            if latent
            else size_of(config, "head_dim") or max(1, hidden // heads),
            latent=latent,
            intermediate=size_of(config, "intermediate_size"),
            vocab=size_of(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings")),
            experts=experts,
            window=size_of(config, "sliding_window"),
            window_layers=layers_with_windows(config),
            linear=linear,
            gated=linear is not None
            and alone is None
            and config.get("attn_output_gate") is not False,
            mlps=0 if alone is None else alone.count("mlp"),
            mlp_gate=known.gate,
            max_positions=size_of(config, "max_position_embeddings"),
            dtype_bytes=dtype_bytes,
            quantized=quantized,
        )

    @property
    def matrix_bytes(self) -> int:
        """Of an element of what is quantized where weights are."""
        return self.quantized.weight_bytes or self.dtype_bytes

    @property
    def attention_layers(self) -> int:
        """Layers whose KV grows with a context."""
        return self.layers - self.mlps - (self.linear.layers if self.linear else 0)

    @property
    def dense_layers(self) -> int:
        """Layers with an MLP, and without experts."""
        return self.mlps or self.layers - (self.experts.layers if self.experts else 0)

    @property
    def depth(self) -> float:
        """Layers; one with attention and one with an MLP are one."""
        return self.layers / 2 if self.mlps else self.layers

    def kv_share(self, context: Any) -> Any:
        """Share of the KV of contexts of so many tokens that layers with a window leave."""
        beyond = np.maximum(0.0, 1 - self.window / np.maximum(1.0, context))
        return 1 - self.window_layers / self.layers * beyond

    def layer_weights(self, tp: int) -> float:
        """Weights of all layers that every token needs, on one rank: all but the experts.

        KV projections are replicated where heads are, and routers.
        """
        return self._matrices(tp) + self._routers

    @property
    def _routers(self) -> int:
        """Weights of the routers of all layers, which are never quantized."""
        if self.experts is None:
            return 0
        router = self.experts.count + self.experts.shared_gate
        return self.hidden * self.experts.layers * router

    def _matrices(self, tp: int) -> float:
        """Weights of all layers that every token needs, on one rank, without routers."""
        if self.latent is not None:
            of_layer = self.latent.weights(self.hidden, self.heads / tp)
        else:
            kv_heads = max(1.0, self.kv_heads / tp)
            of_heads = (2 + self.gated) * self.heads / tp + 2 * kv_heads
            of_layer = self.hidden * self.head_dim * of_heads
        attention = self.attention_layers * of_layer
        if self.linear is not None:
            attention += self.linear.layers * self.linear.weights(self.hidden) / tp
        matrices = 3 if self.mlp_gate else 2
        mlp = self.dense_layers * matrices * self.intermediate / tp
        if self.experts is not None:
            mlp += self.experts.layers * 3 * self.experts.shared / tp
        return attention + self.hidden * mlp

    def layer_bytes(self, tp: int) -> float:
        """What `layer_weights` take."""
        return self._matrices(tp) * self.matrix_bytes + self._routers * self.dtype_bytes

    def absorbed_bytes(self, tp: int) -> int:
        """Copies of what latent attention makes keys and values by, in the model's type, on one
        rank; 0 where they are views of weights that are not quantized.

        Decoding multiplies by them in place of the weights.
        """
        if self.latent is None or self.quantized.weight_bytes is None:
            return 0
        of_head = self.latent.rank * (self.latent.nope + self.latent.value)
        return self.attention_layers * self.heads * of_head * self.dtype_bytes // tp

    def kv_elements(self, tp: int) -> int:
        """Elements of a token's KV in one layer on one rank; few heads are replicated.

        A latent vector is whole on every rank.
        """
        if self.latent is not None:
            return self.latent.rank + self.latent.rope
        return 2 * max(1, self.kv_heads // tp) * self.head_dim

    def attention_operations(self, tp: int, decode: bool) -> float:
        """Operations of a query token on one token that it attends to, in a layer on one rank.

        Args:
            decode: with latent attention, heads attend to the latent vectors themselves then; in a
                prompt to the keys and values that are made of them.
        """
        if self.latent is None:
            width = 2 * self.head_dim
        elif decode:
            width = 2 * self.latent.rank + self.latent.rope
        else:
            width = self.latent.query + self.latent.value
        return 2 * self.heads * width / tp

    @property
    def expert_weights(self) -> int:
        """Weights of one expert in every layer that has some."""
        if self.experts is None:
            return 0
        return self.experts.layers * 3 * self.hidden * self.experts.intermediate

    def head_weights(self, tp: int) -> float:
        """Weights of the LM head on one rank, with the rows that vLLM adds to the vocabulary."""
        return -(-self.vocab // VOCAB_PADDING) * VOCAB_PADDING * self.hidden / tp

    def resident_weights(self, tp: int, spread: bool = False) -> float:
        """Weights in one rank's memory, the embedding included.

        Args:
            spread: a mixture's experts lie whole on the ranks; else each is cut.
        """
        weights = self.layer_weights(tp) + self._head_and_embedding(tp)
        return weights + self.expert_weights * self._held_experts(tp, spread)

    def _head_and_embedding(self, tp: int) -> float:
        return self.head_weights(tp) * (1 if self.tied else 2)

    def _held_experts(self, tp: int, spread: bool) -> float:
        """Experts of a layer in one rank's memory."""
        if self.experts is None:
            return 0
        return self.experts.most_on_rank(tp) if spread else self.experts.count / tp

    def resident_bytes(self, tp: int, spread: bool = False) -> float:
        """What `resident_weights` take."""
        experts = self.expert_weights * self._held_experts(tp, spread) * self.matrix_bytes
        return self.layer_bytes(tp) + self._head_and_embedding(tp) * self.dtype_bytes + experts

    def weight_bytes(self, tp: int, spread: bool = False) -> int:
        """A rank's shard of all weights but norms and biases, as in `resident_weights`."""
        return int(self.resident_bytes(tp, spread))

    def divides(self, tp: int) -> bool:
        """Whether heads of every kind and MLPs can be split over `tp` ranks.

        How a mixture's experts can lie is another question (`MoEConfig.resolve`).
        """
        kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        mlp = self.dense_layers == 0 or self.intermediate % tp == 0
        shared = self.experts is None or self.experts.shared % tp == 0
        linear = self.linear is None or self.linear.keys % tp == 0
        return self.heads % tp == 0 and mlp and shared and kv and linear

    @property
    def rotary_bytes(self) -> int:
        """The table of rotary embeddings, of which a process has one."""
        width = self.head_dim if self.latent is None else self.latent.rope
        return self.max_positions * width * self.dtype_bytes

    def swap_table_bytes(self, layouts: Sequence[Layout], spread: bool = False) -> int:
        """Tables of the rows that trade places between any two layouts, about.

        They lie on the device, with weights in place.

        Args:
            spread: as in `resident_weights`.
        """
        base, *others = (layout.tp for layout in layouts)
        fused = 0  # of latent attention nothing that is cut is fused
        if self.latent is None:
            queries = (1 + self.gated) * self.heads
            fused = (queries + 2 * self.kv_heads) // base * self.head_dim * self.attention_layers
        if self.linear is not None and self.linear.apart:
            fused += self.linear.rows // base * self.linear.layers
        if self.mlp_gate:
            fused += 2 * self.intermediate // base * self.dense_layers
        if (experts := self.experts) is not None:
            held = experts.most_on_rank(base) if spread else experts.count / base
            fused += int(experts.layers * 2 * (experts.intermediate * held + experts.shared / base))
        chunks = fused * self.hidden * self.matrix_bytes / SWAP_CHUNK_BYTES
        pairs = len(others) * (len(others) + 1)
        return int(pairs * _SWAPPED * chunks * _SWAP_ROW_BYTES)

    def gathered_bytes(self, layouts: Sequence[Layout]) -> int:
        """What a switch brings together of a quantized matrix at once, at most: of the widest.

        Marlin has matrices the other way round, so fused ones count as well. Kernels for plain
        weights take them where they are.
        """
        sizes = [layout.tp for layout in layouts]
        if self.quantized.weight_bytes is None or len(sizes) == 1:
            return 0
        value = self.head_dim if self.latent is None else self.latent.value
        mlps = [self.intermediate] * (self.dense_layers > 0)
        if self.experts is not None:
            mlps.append(self.experts.shared)
        widest = max(
            (self.heads // sizes[1] + 2 * max(1, self.kv_heads // sizes[1])) * value,
            *((1 + self.mlp_gate) * mlp // sizes[1] for mlp in mlps),
        )
        return self.hidden * widest * self.quantized.weight_bytes

    def kv_bytes_per_token(self, tp: int) -> int:
        """KV of one token, over all layers, on a rank; heads are replicated where they are few."""
        of_element = self.quantized.kv_bytes or self.dtype_bytes
        return self.attention_layers * self.kv_elements(tp) * of_element

    def latent_workspace_bytes(self, max_model_len: int, max_num_seqs: int, block_size: int) -> int:
        """Latent vectors of earlier parts of prompts, as vLLM gathers them for a step, in the
        model's type; else 0.

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
        experts = self.experts
        width = experts.intermediate if spread else experts.intermediate // tp
        rows = tokens * experts.per_token
        return rows * (max(width, self.hidden) + max(2 * width, self.hidden)) * self.dtype_bytes
