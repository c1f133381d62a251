"""The sizes of models, from their config.json. Pure; imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
"""The shape fields of the models' public config.json."""

_NOT_DENSE = frozenset(("kv_lora_rank", "n_routed_experts", "num_experts", "num_local_experts"))
"""Fields of the config.json of models whose steps are others than a dense decoder's."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a dense decoder, counted in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSize:
        needed = (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        missing = [name for name in needed if not config.get(name)]
        if missing:
            raise ValueError(
                f"the model's config has no {', '.join(missing)}; only dense decoders such as "
                f"Llama and Qwen3 can be modelled (shapes at hand: {', '.join(MODEL_SHAPES)})"
            )
        unlike = sorted(_NOT_DENSE & {name for name, value in config.items() if value})
        if unlike:
            raise ValueError(
                f"the model's config has {', '.join(unlike)}: mixtures of experts and latent "
                "attention cannot be modelled, and PAT does not serve them; only dense decoders "
                "such as Llama and Qwen3"
            )
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def layer_weights(self, tp: int) -> float:
        """Weights of all layers on one rank; KV projections are replicated where heads are."""
        kv_heads = max(1.0, self.kv_heads / tp)
        attention = self.hidden * self.head_dim * (2 * self.heads / tp + 2 * kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate / tp)

    def head_weights(self, tp: int) -> float:
        """Weights of the LM head on one rank."""
        return self.vocab * self.hidden / tp

    def resident_weights(self, tp: int) -> float:
        """Weights in one rank's memory, the embedding included."""
        return self.layer_weights(tp) + self.head_weights(tp) * (1 if self.tied else 2)

    def divides(self, tp: int) -> bool:
        """Whether heads, KV heads and the MLP can be split over `tp` ranks."""
        kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and self.intermediate % tp == 0 and kv
