"""Tiny drafters with weights, by whose drafts it shows whether they are loaded right.

Their targets go through a phrase (see `pat_vllm.doctor.models`), as do their drafts: by the
channels of the residual stream that say which token of the phrase the last one is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pat_vllm.doctor.models import Weights as Like
from pat_vllm.doctor.models import _repeat, mtp_module

DRAFT_VOCAB = 256
"""Tokens of EAGLE-3's vocabulary, half of the target's, in another order."""
PHRASE, FIRST = 16, 3
"""Tokens of the phrase, and the first one's id."""

Weights = dict[str, Any]


def _rewrite(
    path: Path, change: Callable[[dict[str, Any], Weights], tuple[dict[str, Any], Weights]]
) -> None:
    """Change the config and the weights of a checkpoint."""
    from safetensors.torch import load_file, save_file

    config, weights = change(
        json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    )
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def mimo(path: Path) -> None:
    """Give a Qwen2 model an MTP module, which looks at the embeddings and little else."""

    def change(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
        more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        return config | more, weights | mtp_module(weights, config["num_hidden_layers"])

    _rewrite(path, change)


def qwen3_next(path: Path) -> None:
    """Give a Qwen3-Next or Qwen3.5 model an MTP module, a layer with attention, as `mimo` does."""
    import torch

    def change(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
        hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
        layer = f"model.layers.{last}."
        module = {
            name.replace(layer, "mtp.layers.0."): w * (0.05 if _leaves_a_layer(name) else 0.9)
            for name, w in weights.items()
            if name.startswith(layer)
        }
        ones, zeros = torch.eye(hidden), torch.zeros(hidden, hidden)
        module["mtp.fc.weight"] = torch.cat([ones, zeros], dim=1)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            module[f"mtp.{norm}.weight"] = torch.zeros(hidden)  # what is added to 1
        dtype = weights[f"{layer}input_layernorm.weight"].dtype
        own = {name: w.to(dtype).contiguous() for name, w in module.items()}
        modules = dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), 1)
        return config | modules, weights | own

    _rewrite(path, change)


def one_layer_more(path: Path) -> None:
    """Give a DeepSeek or GLM-4.5 model an MTP module as its published checkpoints have it: one more
    layer, of experts, with a head; see `mimo`."""
    import torch

    def change(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        last, more = (f"model.layers.{layer}." for layer in (layers - 1, layers))
        module = {
            name.replace(last, more): w * (0.05 if _leaves_a_layer(name) else 1)
            for name, w in weights.items()
            if name.startswith(last)
        }
        ones, zeros = torch.eye(hidden), torch.zeros(hidden, hidden)
        module[f"{more}eh_proj.weight"] = torch.cat([ones, zeros], dim=1)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            module[f"{more}{norm}.weight"] = torch.ones(hidden)
        for name in ("model.embed_tokens", "lm_head"):
            own = name.replace("model.", more).replace("lm_head", f"{more}shared_head.head")
            module[f"{own}.weight"] = weights[f"{name}.weight"].clone()
        return config | {"num_nextn_predict_layers": 1}, weights | module

    _rewrite(path, change)


def nemotron_h(path: Path) -> None:
    """Have a Nemotron-H model go through a phrase, and give it an MTP module of attention alone,
    as `mimo` does."""
    import torch

    def change(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
        hidden, kinds = config["hidden_size"], config["layers_block_type"]
        weights["model.embed_tokens.weight"] = weights.pop("model.embeddings.weight")
        _repeat(weights, Like(gain=2.0, repeat=1.2), len(kinds))
        weights["model.embeddings.weight"] = weights.pop("model.embed_tokens.weight")
        layer = f"model.layers.{len(kinds) - 1}."
        assert kinds[-1] == "full_attention"
        module = {
            name.replace(layer, "mtp.layers.0."): w * (0.05 if _leaves_a_layer(name) else 0.9)
            for name, w in weights.items()
            if name.startswith(layer)
        }
        ones, zeros = torch.eye(hidden), torch.zeros(hidden, hidden)
        module["mtp.layers.0.eh_proj.weight"] = torch.cat([ones, zeros], dim=1)
        for norm in ("enorm", "hnorm", "final_layernorm"):
            module[f"mtp.layers.0.{norm}.weight"] = torch.ones(hidden)
        more = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention"]}
        return config | more, weights | module

    _rewrite(path, change)


def _leaves_a_layer(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def eagle3(path: Path) -> None:
    """Make of a model an EAGLE-3 drafter for it: without embeddings, with a head of its own."""
    import torch

    def change(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
        hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
        kv_heads = config["num_key_value_heads"] * config["head_dim"]
        of_layer = {
            name.removeprefix("model.layers.0."): w
            for name, w in weights.items()
            if name.startswith("model.layers.0.") and not name.endswith("_norm.weight")
        }
        generator = torch.Generator().manual_seed(int(weights["lm_head.weight"].sum() * 1000))
        for name, rows in {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}.items():
            weight = torch.randn(rows, 2 * hidden, generator=generator) * hidden**-0.5
            of_layer[f"self_attn.{name}.weight"] = weight
        of_layer["hidden_norm.weight"] = torch.ones(hidden)
        head = weights["lm_head.weight"].clone()
        head[:, PHRASE:] *= 0.01
        # It sees the token before the one that it continues.
        steps = torch.arange(PHRASE)
        head[FIRST + (steps + 1) % PHRASE] = head[FIRST + steps]
        ids = torch.arange(DRAFT_VOCAB)
        targets = DRAFT_VOCAB - 1 - ids
        own = {f"midlayer.{name}": w for name, w in of_layer.items()} | {
            "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1),
            "norm.weight": torch.ones(hidden),
            "lm_head.weight": head[targets].contiguous(),
            "d2t": targets - ids,
        }
        more = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": DRAFT_VOCAB,
        }
        kept = {name: value for name, value in config.items() if name != "layer_types"}
        return kept | more, own

    _rewrite(path, change)


def eagle(path: Path) -> None:
    """Make of a model an EAGLE drafter for it, without embeddings and head, which looks at the last
    token's embedding and little else."""
    import torch

    def change(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
        hidden = config["hidden_size"]
        own = {
            name.removeprefix("model."): w * (0.05 if _leaves_a_layer(name) else 1)
            for name, w in weights.items()
            if name.startswith("model.layers.0.")
            and not name.endswith(("q_norm.weight", "k_norm.weight", "input_layernorm.weight"))
        }
        own["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
        more = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
        }
        kept = {name: value for name, value in config.items() if name != "layer_types"}
        return kept | more, own

    _rewrite(path, change)


DRAFTERS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    f"{name}{updated}": (f"{spec}{updated}", finish)
    for name, (spec, finish) in {
        "mimo": ("repeating_qwen2", mimo),
        "qwen3_next_mtp": ("interrupted_next", qwen3_next),
        "qwen3_5_mtp": ("interrupted_3_5", qwen3_next),
        "nemotron_h_mtp": ("nemotron_h", nemotron_h),
        "deepseek_mtp": ("repeating_deepseek", one_layer_more),
        "glm_mtp": ("repeating_glm", one_layer_more),
        "eagle3": ("repeating", eagle3),
        "eagle": ("repeating", eagle),
    }.items()
    for updated in ("", "_updated")
} | {
    "eagle3_of_another": ("qwen3", eagle3),
    "vocab16_mimo": ("vocab16_qwen2", mimo),
    "next_eagle": ("next_draft", eagle),
}
"""Models and drafters by name: the random model that they are made of, and what makes them. What is
of another model drafts wrong."""
