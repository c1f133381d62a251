"""What layers of each kind hold, from the contents of a Hugging Face `config.json`. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pat_vllm.models.model_classes import EXPERT_COUNTS, class_of, known_class

_EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")
_KINDS_OF_LAYERS = ("hybrid_override_pattern", "layers_block_type", "layer_types", "block_types")
"""Fields of a `config.json` that say what each layer is."""
_STATES = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "M"})
"""What layers are called there that have states."""
_ALONE = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_ALONE |= {"mamba": "linear_attention", "attention": "full_attention"}
"""What a layer of Nemotron-H has, by how a `config.json` names it."""
_MOST = 1 << 24
"""No size in a config may exceed this. Real ones are far below."""
_MOST_LAYERS = 1 << 14


def size_of(config: Mapping[str, Any], name: str, default: int = 0, most: int = _MOST) -> int:
    """A size in the contents of a `config.json`.

    Raises:
        ValueError: it is no whole number from 0 to `most`.
    """
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(
            f"the model's config has {name}={reprlib.repr(value)[:80]}; allowed is a whole number "
            f"up to {most}"
        )
    return value


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the `config.json` of a vision-language class says of its text model; others as they are.

    Whether the head is the embeddings may stand beside it.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return tied | text


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a config of transformers', defaults included."""
    fields: dict[str, Any] = config.to_dict()
    kinds = getattr(config, "layers_block_type", None)  # Jamba's is made of other fields
    return fields if kinds is None else {**fields, "layers_block_type": list(kinds)}


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether some layers are of Mamba, linear attention or their like, by what layers are."""
    if "state_size" in config or size_of(config, "attn_layer_period") > 1:
        return True  # of Mamba, all; of Jamba, those between layers with attention
    kinds = [config[name] for name in _KINDS_OF_LAYERS if isinstance(config.get(name), str | list)]
    return any(kind in _STATES for layers in kinds for kind in map(str, layers))


def alone_in_layers(config: Mapping[str, Any]) -> list[str] | None:
    """What each layer has, in models whose layers have one of attention, linear attention, an MLP
    and experts.

    Returns:
        "full_attention", "linear_attention", "mlp" or "moe" for each layer; None: layers have
        attention of some kind, and an MLP or experts.
    """
    if (known := class_of(config)) is None or known.linear != "mamba2":
        return None
    for name in ("hybrid_override_pattern", "layers_block_type"):
        if isinstance(kinds := config.get(name), str | list):
            return [_ALONE.get(kind, kind) for kind in map(str, kinds)]
    return None


def linear_heads(config: Mapping[str, Any]) -> int:
    """Into how many parts linear attention can be cut: key heads, of Mamba2 groups; 0: no model
    with linear attention that is known here."""
    heads = {"mamba2": "n_groups", "delta_net": "linear_num_key_heads"}
    known = class_of(config)
    return size_of(config, heads[known.linear]) if known and known.linear else 0


def names_experts(config: Mapping[str, Any]) -> str | None:
    """The field that has the number of a layer's experts; None: the model has none."""
    named = next((name for name in EXPERT_COUNTS if config.get(name)), None)
    return named if may_have_experts(config) else None


def experts_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many experts a layer has, without those that every token goes to, and how wide they are;
    None: the model has no experts, or not one number and one width for all layers.
    """
    if not may_have_experts(config):
        return None
    sizes: list[Any] = [
        next((config[name] for name in names if config.get(name)), None)
        for names in (EXPERT_COUNTS, _EXPERT_WIDTHS)
    ]
    known = all(type(value) is int and 0 < value <= _MOST for value in sizes)
    return (sizes[0], sizes[1]) if known else None


def routing_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many experts a layer has, and to how many of them a token goes; None: there are none."""
    if (experts := experts_of(config)) and (per_token := size_of(config, "num_experts_per_tok")):
        return experts[0], per_token
    return None


@dataclass(frozen=True)
class ExpertSizes:
    """What some layers of a mixture have in place of an MLP, counted in elements.

    Attributes:
        count: experts of a layer.
        per_token: experts that a token goes to.
        intermediate: width of an expert.
        shared: width of the MLP that every token goes to beside them; 0: there is none.
        shared_gate: that has a gate of its own.
        layers: that have experts.
    """

    count: int
    per_token: int
    intermediate: int
    shared: int
    shared_gate: bool
    layers: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ExpertSizes | None:
        """From the contents of a `config.json`; None: the model has no experts.

        Raises:
            ValueError: it has, but no mixture is known of its class, or a token goes to more than
                there are.
        """
        if (named := names_experts(config)) is None:
            return None
        experts, known = experts_of(config), known_class(config)
        if experts is None or not known.mixture or not config.get("num_experts_per_tok"):
            raise ValueError(
                f"the model's config has {named}: of {known.names[0]}, no sizes of a mixture of "
                "experts are known, or num_experts_per_tok is missing"
            )
        count, intermediate = experts
        per_token = size_of(config, "num_experts_per_tok")
        if not 1 <= per_token <= count:
            raise ValueError(f"a token goes to 1 to {count} experts, not to {per_token}")
        shared = size_of(config, "shared_expert_intermediate_size")
        gated = bool(shared)
        if number := size_of(config, "n_shared_experts"):
            shared = intermediate * number
        return cls(
            count=count,
            per_token=per_token,
            intermediate=intermediate,
            shared=shared,
            shared_gate=gated,
            layers=sum(_has_experts(config, i) for i in range(layers_of(config))),
        )

    def most_on_rank(self, tp: int) -> int:
        """Experts of a layer on the rank that has most, where they are spread over `tp` ranks."""
        return -(-self.count // tp)


def may_have_experts(config: Mapping[str, Any]) -> bool:
    """Whether some layer may, if sizes of experts are given: transformers gives them always."""
    alone = alone_in_layers(config)
    return alone is None or "moe" in alone


def layers_of(config: Mapping[str, Any]) -> int:
    if (alone := alone_in_layers(config)) is not None:
        return min(len(alone), _MOST_LAYERS)
    return size_of(config, "num_hidden_layers", most=_MOST_LAYERS)


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether that layer of a mixture does; else it has an MLP."""
    if layer < size_of(config, "first_k_dense_replace"):
        return False
    sparse_step = size_of(config, "decoder_sparse_step") or 1
    if layer % (size_of(config, "moe_layer_freq") or 1):
        return False
    mlps = config.get("mlp_only_layers")
    return not (isinstance(mlps, list) and layer in mlps) and (layer + 1) % sparse_step == 0


def layers_with_windows(config: Mapping[str, Any]) -> int:
    """Layers with a sliding window."""
    used = config.get("use_sliding_window", known_class(config).windows)
    if not size_of(config, "sliding_window") or not used:
        return 0
    layers, kinds = layers_of(config), config.get("layer_types")
    if isinstance(kinds, list):
        return min(layers, sum(kind == "sliding_attention" for kind in kinds))
    every = 2 if config.get("model_type") == "gemma2" else size_of(config, "sliding_window_pattern")
    return layers - layers // every if every else layers


@dataclass(frozen=True)
class LatentSizes:
    """What latent attention has in place of heads of keys and values, counted in elements.

    Attributes:
        rank: of a token's latent vector, of which all heads make their keys and values.
        rope: of the part of a key that has a position, which all heads share.
        nope: of the rest of a head's key.
        value: of a head's value.
        query_rank: of the vector that queries are made of; 0: the hidden state is.
    """

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LatentSizes | None:
        """From the contents of a `config.json`; None: the model has heads of keys and values."""
        if not (rank := size_of(config, "kv_lora_rank")):
            return None
        return cls(
            rank=rank,
            rope=size_of(config, "qk_rope_head_dim"),
            nope=size_of(config, "qk_nope_head_dim"),
            value=size_of(config, "v_head_dim"),
            query_rank=size_of(config, "q_lora_rank"),
        )

    @property
    def query(self) -> int:
        """Width of a head's query and key."""
        return self.nope + self.rope

    def weights(self, hidden: int, heads: float) -> float:
        """Elements of a layer's weights on a rank with `heads` heads. What makes latent vectors is
        replicated."""
        source = self.query_rank or hidden
        replicated = hidden * (self.query_rank + self.rank + self.rope)
        keys_and_values = self.rank * (self.nope + self.value)
        return replicated + heads * (source * self.query + keys_and_values + self.value * hidden)


@dataclass(frozen=True)
class LinearSizes:
    """Layers with linear attention (Gated DeltaNet, Mamba2) in place of attention, in elements.

    Attributes:
        layers: that have it.
        keys, values: heads; of Mamba2 its groups, and its heads.
        key, value: width of a head.
        kernel: tokens that the convolution sees.
        wide: whether the states' matrices are kept in 32 bits, whatever the model's type is.
        apart: whether queries, keys, values and gates are cut each by itself.
        gates: of a value head, one element each.
    """

    layers: int
    keys: int
    values: int
    key: int
    value: int
    kernel: int
    wide: bool
    apart: bool
    gates: int = 2

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LinearSizes | None:
        """From the contents of a `config.json`; None: the model has none."""
        if not (keys := linear_heads(config)):
            return None
        if alone := alone_in_layers(config):
            return cls(
                layers=alone.count("linear_attention"),
                keys=keys,
                values=size_of(config, "mamba_num_heads"),
                key=size_of(config, "ssm_state_size"),
                value=size_of(config, "mamba_head_dim"),
                kernel=size_of(config, "conv_kernel"),
                wide=config.get("mamba_ssm_cache_dtype", "float32") == "float32",
                apart=True,
                gates=1,
            )
        layers, kinds = layers_of(config), config.get("layer_types")
        if isinstance(kinds, list):
            count = min(layers, sum(kind == "linear_attention" for kind in kinds))
        else:
            count = layers - layers // (size_of(config, "full_attention_interval") or 4)
        return cls(
            layers=count,
            keys=keys,
            values=size_of(config, "linear_num_value_heads") or keys,
            key=size_of(config, "linear_key_head_dim"),
            value=size_of(config, "linear_value_head_dim"),
            kernel=size_of(config, "linear_conv_kernel_dim"),
            wide=config.get("mamba_ssm_dtype") == "float32",
            apart="qwen3_next" not in known_class(config).model_types,
        )

    @property
    def columns(self) -> int:
        """Queries, keys and values of a token: what the convolution sees."""
        return 2 * self.keys * self.key + self.values * self.value

    @property
    def rows(self) -> int:
        """Rows of the matrix that makes queries, keys and values, with the gates."""
        return self.columns + self.values * self.value

    @property
    def matrix(self) -> int:
        """Elements of a request's state in a layer: a matrix for each value head."""
        return self.values * self.value * self.key

    def weights(self, hidden: int) -> int:
        """Elements of a layer's weights."""
        around = hidden * (self.rows + (self.gates + self.value) * self.values)
        return around + self.columns * self.kernel

    def state_bytes(self, dtype_bytes: int) -> int:
        """What a request has in a layer, of all heads, whatever the number of its tokens."""
        matrix = self.matrix * (4 if self.wide else dtype_bytes)
        return matrix + (self.kernel - 1) * self.columns * dtype_bytes
