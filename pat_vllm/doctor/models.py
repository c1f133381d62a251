"""Random checkpoints: what their config.json says, by kind of model, and their weights.

The weights are noise, but scaled so that generation behaves like a model's: logits are peaked (an
argmax is not decided by rounding) and depend on the whole context. A model may also repeat itself
(`_repeat`), so that n-gram drafts are accepted. torch and transformers are imported by the
functions, so that the command line starts without them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

POSITIONS = 4096
"""Tokens that a request to one of `SHAPES` may have."""
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
"""The first ids of a random model's vocabulary."""

_NORM_STD, _BIAS_STD = 0.1, 0.5
_GEMMA_EMBEDDING = 0.3
"""Standard deviation of what Gemma's embeddings add to the residual stream; norms add 1 each."""
_PUBLISHED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Weights of an expert in published checkpoints, by transformers' name of all experts' together."""


@dataclass(frozen=True)
class Shape:
    """A kind of random model.

    Attributes:
        config: what its config.json has beside `_COMMON`, or in place of it.
        gain: about the standard deviation of the logits; smaller is flatter.
        dtype: in which alone vLLM's CPU kernels take it; None: any.
        reloads: whether vLLM's `reload_weights` loads all of its weights.
    """

    config: Mapping[str, Any]
    gain: float = 4.0
    dtype: str | None = None
    reloads: bool = True

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return "num_experts_per_tok" in self.config

    @property
    def tied(self) -> bool:
        """Whether its output head is its embeddings, so that its text cannot repeat a phrase."""
        return bool(self.config.get("tie_word_embeddings"))

    def config_for(self, ranks: int) -> dict[str, Any]:
        """Its config.json, with heads and widths that so many ranks can share."""
        config = {**_COMMON, **self.config}
        if config["num_attention_heads"] % ranks:
            heads = math.lcm(config["num_attention_heads"], ranks)
            config |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
            config["hidden_size"] = math.lcm(config["hidden_size"], heads)
            for name in _SHARED & config.keys():
                config[name] = math.lcm(config[name], ranks)
        return config


_COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}
_SHARED = {
    "intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
}
"""Sizes that ranks divide among themselves, beside heads."""
_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": POSITIONS // 2,
}
# All experts have each token: in 16 bits a router's choice would be of rounding.
_ALL_OF_16 = {"num_experts_per_tok": 16, "moe_intermediate_size": 64}

SHAPES: Mapping[str, Shape] = {
    "dense": Shape({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
    # Four layers as wide as Llama-3.1-8B's, with a smaller vocabulary: 1.1 billion parameters.
    "large": Shape(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14336,
            "vocab_size": 32000,
        }
    ),
    "mixture": Shape(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": 2,
            "num_experts": 16,
            "norm_topk_prob": True,
            **_ALL_OF_16,
        },
        gain=3.0,
    ),
    # Linear attention in two layers of three, and experts.
    "linear": Shape(
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "head_dim": 128,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 64,  # vLLM's CPU kernels take no narrower ones
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "num_experts": 16,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 256,
            **_ALL_OF_16,
        },
        gain=0.5,
        dtype="bfloat16",
    ),
    # Latent attention, and experts but in the first layer. Heads as wide as DeepSeek's: vLLM has no
    # kernel on GPUs for prompts of others, and none on CPU for other ranks of the KV.
    "latent": Shape(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            # With plain positions, what vLLM computes of a token on CPU depends on the others of
            # its step, and on how they are batched.
            "rope_parameters": _YARN
            | {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707},
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 2,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            **_ALL_OF_16,
        },
        gain=2.0,
    ),
    # Sliding windows, shorter than the requests, in two layers of three; ...
    "window": Shape(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }
    ),
    # ... in one of two, with attention sinks and experts.
    "sinks": Shape(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_hidden_layers": 2,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"],
            "intermediate_size": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 8,
            "rope_parameters": _YARN
            | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        gain=2.0,
        reloads=False,
    ),
    # With an MTP module.
    "mtp": Shape(
        {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 256,  # for heads of 32
            "num_nextn_predict_layers": 1,
        }
    ),
}


def shape_named(name: str) -> Shape:
    """The one of `SHAPES` with this name.

    Raises:
        ValueError: there is none.
    """
    if name not in SHAPES:
        raise ValueError(f"--shape {name!r} is not known; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]


@dataclass(frozen=True)
class Weights:
    """What the weights of a random checkpoint are like.

    Attributes:
        gain: about the standard deviation of the logits; smaller is flatter, and makes a
            log-probability less sensitive to rounding.
        repeat: how strongly the model continues its phrase, relative to all else that it might
            say: at 1 greedy text follows it most of the time, at 0 never.
        phrase: tokens of that phrase.
        seed: models that differ in one respect (another seed apart) share all other weights.
    """

    gain: float = 4.0
    repeat: float = 0.0
    phrase: int = 16
    seed: int = 0


def write_checkpoint(path: Path, config: Mapping[str, Any], like: Weights) -> int:
    """Write a random checkpoint without a tokenizer; return the number of parameters.

    The same arguments give the same weights. Takes 10 to 20 s per billion parameters.

    Args:
        path: a directory that does not exist or is empty.
        config: of transformers' class for its `model_type`; `dtype` is that of the weights.

    Raises:
        OSError: the files cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoConfig

    bos, eos, pad = range(len(SPECIAL_TOKENS))
    fields = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, **config}
    whole = AutoConfig.for_model(fields.pop("model_type"), **fields)
    weights = dict(_random_weights(whole, like))
    if like.repeat:
        _repeat(weights, like, whole.num_hidden_layers)
    if getattr(whole, "num_nextn_predict_layers", 0):
        weights |= mtp_module(weights, whole.num_hidden_layers)
    path.mkdir(parents=True, exist_ok=True)
    try:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"the weights cannot be written: {error}") from error
    whole.save_pretrained(path)
    return sum(weight.numel() for weight in weights.values())


def _random_weights(config: PretrainedConfig, like: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by its name. Each has a generator of its own, seeded by that name."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    for name, meta in shapes.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        for part, shape in _as_published(config.model_type, name, meta.shape):
            digest = hashlib.sha256(f"{like.seed}/{part}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            mean, std = _distribution(config.model_type, part, shape, like.gain)
            weight = torch.empty(tuple(shape), dtype=config.dtype)
            yield part, weight.normal_(mean, std, generator=generator)


def _as_published(
    model_type: str, name: str, shape: Sequence[int]
) -> Iterator[tuple[str, Sequence[int]]]:
    """The weights, by name and shape, of which transformers makes this one.

    Published checkpoints have the experts of a layer one by one, but for those of gpt-oss.
    """
    path, _, kind = name.rpartition(".")
    if model_type == "gpt_oss" or not path.endswith(".experts"):
        yield name, shape
        return
    experts, rows, columns = shape
    for expert in range(experts):
        for part in _PUBLISHED[kind]:
            yield f"{path}.{expert}.{part}.weight", (rows // len(_PUBLISHED[kind]), columns)


def _distribution(
    model_type: str, name: str, shape: Sequence[int], gain: float
) -> tuple[float, float]:
    """Mean and standard deviation of one weight.

    A matrix has gain / sqrt(fan_in), so that input of unit variance gives output of standard
    deviation `gain` whatever the width. Initialisation for training (0.02) leaves logits so flat
    that float32 rounding can change an argmax.

    Args:
        shape: of a matrix `[out, in]`; of gpt-oss' experts `[experts, in, out]`.
    """
    gemma = model_type.startswith("gemma")
    if gemma and name == "model.embed_tokens.weight":
        # These are the head's, too, and scaled by the root of the width. Were they as large as the
        # logits ask for, a token would call for itself; the last norm makes up for it.
        return 0.0, _GEMMA_EMBEDDING / math.sqrt(shape[1])
    if gemma and name == "model.norm.weight":
        return gain / _GEMMA_EMBEDDING - 1, _NORM_STD
    if name.endswith(("norm.weight", "norm_f.weight", "mixer.D")):  # the last two are Mamba2's
        adds_one = gemma or model_type.startswith(("qwen3_next", "qwen3_5"))
        return float(not adds_one or name.endswith("linear_attn.norm.weight")), _NORM_STD
    if name.endswith("bias"):
        return 0.0, _BIAS_STD
    if name.endswith("sinks"):
        return 0.0, 1.0
    if name.endswith("A_log"):  # states forget slowly: they depend on the whole context
        return -3.0, 0.5
    if name.endswith("conv1d.weight"):
        return 0.0, 1 / math.sqrt(shape[2])
    return 0.0, gain / math.sqrt(shape[1])


def _repeat(weights: dict[str, torch.Tensor], like: Weights, layers: int) -> None:
    """Write a phrase into the weights: each of its tokens calls for the next, the last the first.

    The phrase is the first `phrase` ids that are not special; another token stands for the one at
    its id modulo `phrase`. The first `phrase` channels of the residual stream say which one it is.
    The embedding writes them, no layer does, and the output head's rows of the phrase read them.
    All other logits, and so the tokens that interrupt the phrase, depend on the whole context.
    """
    import torch

    gain, phrase = like.gain, like.phrase
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    vocab, hidden = embedding.shape
    ids = torch.arange(vocab)
    first = len(SPECIAL_TOKENS)
    size = gain * math.sqrt(phrase / hidden)  # as long as what it replaces
    embedding[:, :phrase] = 0
    embedding[ids, (ids - first) % phrase] = size
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "o_proj.bias")):
            weight[:phrase] = 0
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):  # of gpt-oss
            weight[..., :phrase] = 0
    # The last norm divides by what the layers add, of which an MLP's share is about gain ** 3.
    divisor = gain**3 * math.sqrt(layers / 2)
    # The largest of `vocab` normal numbers is about sqrt(2 ln vocab) standard deviations.
    largest = gain * math.sqrt(2 * math.log(vocab))
    head[:, :phrase] = 0
    head[first + (ids[:phrase] + 1) % phrase, ids[:phrase]] = like.repeat * largest * divisor / size


def mtp_module(weights: Mapping[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The weights of an MTP module as MiMo's checkpoints have it, made of the model's last layer.

    It looks at the embedding of the last token, and at little else. So a model that repeats itself
    accepts some of its drafts.
    """
    import torch

    layer = f"model.layers.{layers - 1}."
    module = {name: 0.9 * w for name, w in weights.items() if name.startswith(layer)}
    norm = weights["model.norm.weight"]
    one = torch.eye(len(norm), dtype=norm.dtype)
    module[f"{layer}input_proj.weight"] = torch.cat([torch.zeros_like(one), one], dim=1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        module[f"{layer}{name}.weight"] = torch.ones_like(norm)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        module[layer + name] = module[layer + name] * 0.05
    return {name.replace(layer, "model.mtp_layers.0."): w for name, w in module.items()}
