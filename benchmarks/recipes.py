"""Which example scripts of a trainer PAT serves as they stand, by the options that they set.

    python -m benchmarks.recipes verl CHECKOUT
    python -m benchmarks.recipes nemo-rl CHECKOUT --list

Nothing is run. An engine's size is the user's to choose (docs/trainers.md), so only one that is
wider than a node is a reason. What is refused is asked of PAT: VeRL's adapter, the rules for
options and models, the classes whose sizes are known, and the table of docs/limits.md. Which class
a name means stands here.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pat_verl.checks import refused_of

from benchmarks.recipe_files import Options, at, config_of, overrides_of
from benchmarks.record import ROOT, commit_of, table
from pat_vllm.models.drafters import is_mtp
from pat_vllm.models.images import SERVED
from pat_vllm.models.model_classes import class_of
from pat_vllm.models.model_rules import MODEL_RULES, QUANTIZATION, ModelFacts
from pat_vllm.start.refused import RULES

CLASSES = {
    r"qwen3[._-]?5-.*a\d+b": "Qwen3_5MoeForConditionalGeneration",
    r"qwen3[._-]?5-": "Qwen3_5ForConditionalGeneration",
    r"qwen3-vl-.*a\d+b": "Qwen3VLMoeForConditionalGeneration",
    r"qwen3-vl-": "Qwen3VLForConditionalGeneration",
    r"qwen2\.5-vl-": "Qwen2_5_VLForConditionalGeneration",
    r"qwen3-omni": "Qwen3OmniMoeForConditionalGeneration",
    r"qwen2\.5-omni": "Qwen2_5OmniModel",
    r"qwen3-next": "Qwen3NextForCausalLM",
    r"qwen3-.*(a\d+b|moe)": "Qwen3MoeForCausalLM",
    r"qwen3-": "Qwen3ForCausalLM",
    r"qwen-?2|distill-qwen": "Qwen2ForCausalLM",
    r"nemotron.*omni": "NemotronH_Nano_VL_V2",
    r"nemotron-(3|nano)": "NemotronHForCausalLM",
    r"llama|deepseek-llm": "LlamaForCausalLM",
    r"mistral-nemo": "MistralForCausalLM",
    r"mistral-medium-3": "Mistral3ForConditionalGeneration",
    r"gemma-4": "Gemma4ForConditionalGeneration",
    r"gemma-3-1b": "Gemma3ForCausalLM",
    r"gemma-3": "Gemma3ForConditionalGeneration",
    r"gpt-oss": "GptOssForCausalLM",
    r"seed-oss": "SeedOssForCausalLM",
    r"moonlight|deepseek(-|_)?v3|guides/deepseek": "DeepseekV3ForCausalLM",
    r"deepseek(-|_)?v4": "DeepseekV4ForCausalLM",
    r"kimi[-_]k2[._-]6": "KimiK25ForConditionalGeneration",
    r"glm-4\.7-flash": "Glm4MoeLiteForCausalLM",
    r"glm-5": "GlmMoeDsaForCausalLM",
    r"glm-4\.1v": "Glm4vForConditionalGeneration",
    r"minimax-m2": "MiniMaxM2ForCausalLM",
    r"minicpm-o": "MiniCPMO",
    r"hy3|hy_v3": "HYV3ForCausalLM",
}
"""vLLM's classes of the models that scripts name, by a part of the name; the first fits."""
_IMAGES = re.compile(r"ForConditionalGeneration$|VL|Omni|MiniCPMO")
"""Classes that take images, video or audio."""
_EXPERTS = re.compile(r"a\d+b|moe", re.IGNORECASE)
"""Names of mixtures of experts: a token goes to so many billions of weights."""
_IMAGE_DATA = re.compile(r"geo3k|video|openr1mm", re.IGNORECASE)

_OF_MODELS = {rule.option for rule in MODEL_RULES} | {
    f"speculative_config.{name}" for name in ("model", "quantization", "num_speculative_tokens")
}
"""What is asked of a checkpoint, or of a drafter's."""

REASONS = {
    "language_model_only": "`language_model_only` is not set",
    "expert_parallel_size": "EP",
    "enable_expert_parallel": "EP",
    "data_parallel_size": "DP in one engine",
    "pipeline_parallel_size": "pipeline parallel",
    "pipeline_model_parallel_size": "pipeline parallel",
    "tensor_model_parallel_size": "wider than a node",
    "nnodes": "wider than a node",
    "lora_rank": "LoRA, not merged",
    "enable_rollout_routing_replay": "routing replay",
    "enable_return_routed_experts": "routing replay",
    "method": "drafter",
    "speculative_config": "drafter",
    "quantization=modelopt_mxfp8": "MXFP8",
    "quantization=modelopt_fp4": "NVFP4",
    "worker_cls": "quantizers in a `worker_cls`",
}
"""What the rules' options are called in the table, by their last part; others keep their names."""


@dataclass(frozen=True)
class Script:
    """An example script that generates with vLLM, why PAT refuses it, and whether it has weights or
    KV in fp8, MXFP8 included."""

    path: str
    reasons: frozenset[str]
    fp8: bool


class _Asked:
    """In place of vLLM's config where a rule is asked of some options. A group of options that was
    not given as one is the whole."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            setattr(self, name, _Asked(value) if isinstance(value, Mapping) else value)

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self) -> Any:
        return self


def refused_options(options: Options, class_: str, experts: bool) -> set[str]:
    """The options of vLLM's, alone or in groups, that an engine refuses with a model of a class.

    With `language_model_only`, false or true, among them it is a class that takes images.
    """
    known = class_of({"architectures": [class_]})
    groups = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    given = {f"{group}.{name}" for group, values in groups.items() for name in values}
    given |= {*options, *(name for values in groups.values() for name in values)}
    if is_mtp(at(options, "speculative_config.method")):  # by any of vLLM's names
        drafts = {**options["speculative_config"], "method": "mtp"}
        options = {**options, "speculative_config": drafts}
    backend = {"backend": {"name": options.get("attention_backend")}}
    named = {"architectures": [known.names[0]] if known else []}
    renamed = {
        "cache_dtype": options.get("kv_cache_dtype"),
        "attention_config": backend,
        "hf_text_config": SimpleNamespace(to_dict=lambda: named),
        "architecture": class_,
        "supports_multimodal_inputs": not options.get("language_model_only", True),
    }
    asked: Any = _Asked({**renamed, **options})
    found = {
        rule.option
        for rule in RULES
        if rule.option in given
        and rule.option not in _OF_MODELS
        and (experts or not rule.mixtures)
        and (bool(known and known.linear) or not rule.linear)
        and rule.refused(asked) is not None
    }
    facts = ModelFacts("", {}, quantization=options.get("quantization"))
    if quantization := QUANTIZATION.refused(facts):
        found.add(f"quantization={quantization}")
    return found


def refused_model(name: str) -> tuple[set[str], str, bool]:
    """Why PAT refuses a model whatever the options, its class ("": not known), and whether it has
    experts."""
    class_ = next((CLASSES[part] for part in CLASSES if re.search(part, name, re.I)), "")
    known = class_of({"architectures": [class_]})
    experts = bool(_EXPERTS.search(name)) or (known is not None and known.mixture)
    tested = (ROOT / "docs" / "limits.md").read_text()
    reasons = set()
    if class_ and known is None and class_ not in SERVED and f"\n| {class_} |" not in tested:
        reasons.add("class not known")
    if known is not None and experts and not known.mixture:
        reasons.add(f"experts of {class_.removesuffix('ForCausalLM')}")
    return reasons, class_, experts


def verl_script(path: str, text: str) -> Script | None:
    """A shell script of VeRL's; None: it does not train with vLLM's responses."""
    options = overrides_of(text)
    rollout = dict(at(options, "actor_rollout_ref.rollout", {}))
    if rollout.get("name") != "vllm" or "main_generation" in text:
        return None
    model = at(options, "actor_rollout_ref.model", {})
    rollout["mtp"] = model.get("mtp")  # as VeRL's own config takes it
    gpus = at(options, "rollout.n_gpus_per_node") or at(options, "trainer.n_gpus_per_node", 8)
    width = at(rollout, "tensor_model_parallel_size", 2)
    width *= at(rollout, "data_parallel_size", 1)
    rollout["tensor_model_parallel_size"] = width if width > 1 else gpus
    found = {option.rpartition(".")[2] for option, *_ in refused_of(rollout, model, gpus)}
    if gpus == 1:
        found = found - {"tensor_model_parallel_size"} | {"one GPU"}
    data = f"{at(options, 'data.train_files')} {at(options, 'data.image_key')}"
    images = bool(_IMAGE_DATA.search(data)) or at(options, "data.image_key") is not None
    kwargs = dict(at(rollout, "engine_kwargs.vllm", {}))
    kwargs["quantization"] = rollout.get("quantization")
    return _script(path, f"{model.get('path') or path}", kwargs, images, found)


def nemo_rl_recipe(path: str, config: Options) -> Script | None:
    """A recipe of NeMo-RL's; None: it does not generate with vLLM."""
    generation = at(config, "policy.generation", {})
    if generation.get("backend") != "vllm":
        return None
    of_vllm = generation.get("vllm_cfg", {})
    own = at(generation, "colocated.resources.gpus_per_node")
    gpus = own or at(config, "cluster.gpus_per_node")
    kinds = ("tensor", "pipeline", "expert")
    tp, pp, ep = (at(of_vllm, f"{kind}_parallel_size", 1) for kind in kinds)
    options = {
        "pipeline_parallel_size": pp,
        "data_parallel_size": max(1, ep // tp),
        "nnodes": -(-tp * pp // gpus),
        "enable_expert_parallel": ep > 1,
        "enable_return_routed_experts": bool(at(config, "policy.router_replay.enabled")),
        "kv_cache_dtype": at(of_vllm, "kv_cache_dtype", "auto"),
    }
    if of_vllm.get("precision") == "fp8":
        options["quantization"] = "modelopt_mxfp8" if of_vllm.get("is_mx") else "fp8"
    found = set()
    if generation.get("quant_cfg") and generation.get("real_quant"):
        options["quantization"] = "modelopt_fp4"
    elif generation.get("quant_cfg"):  # quantizers in a worker class of its own
        found.add("worker_cls")
    options |= at(generation, "vllm_kwargs", {})
    return _script(path, str(config["policy"].get("model_name")), options, "/vlm/" in path, found)


def _script(path: str, model: str, options: Options, images: bool, found: set[str]) -> Script:
    """What comes of a script's options for vLLM, and of what was found already."""
    reasons, class_, experts = refused_model(model)
    if images or _IMAGES.search(class_):
        options = {"language_model_only": False, **options}
    found |= refused_options(options, class_, experts)
    if images and "language_model_only" in found:
        kind = class_.removesuffix("ForConditionalGeneration") or "a class that is not named"
        found = found - {"language_model_only"} | {f"images of {kind}"}
    reasons |= {REASONS.get(each.rpartition(".")[2], each) for each in found}
    values = (str(value) for value in (options.get("quantization"), options.get("kv_cache_dtype")))
    return Script(path, frozenset(reasons), any("fp8" in value for value in values))


def scripts_of(trainer: str, root: Path) -> Iterator[Script]:
    """The scripts of a trainer's checkout that generate with vLLM, by path."""
    verl = trainer == "verl"
    places = ("examples", "verl/experimental", "tests") if verl else ("examples/configs/recipes",)
    pattern = "*.sh" if verl else "*.yaml"
    for path in sorted(path for place in places for path in (root / place).rglob(pattern)):
        name = path.relative_to(root).as_posix()
        if verl:
            script = verl_script(name, path.read_text())
        else:
            script = nemo_rl_recipe(name, config_of(path))
        if script is not None:
            yield script


def count(trainer: str, root: Path, scripts: list[Script], with_list: bool) -> str:
    """What the scripts come to, in Markdown; with a list, each of them."""
    refused = [script for script in scripts if script.reasons]
    reasons = Counter(reason for script in refused for reason in script.reasons)
    only = Counter(min(each.reasons) for each in refused if len(each.reasons) == 1)
    header = "trainer", "commit", "with vLLM", "served", "refused", "reasons", "the only reason"
    numbers = len(scripts), len(scripts) - len(refused), len(refused)
    said = (", ".join(f"{name} {n}" for name, n in each.most_common()) for each in (reasons, only))
    of_fp8 = [script for script in scripts if script.fp8]
    alone = sum(not script.reasons for script in of_fp8)
    text = table(header, [(trainer, commit_of(root), *numbers, *said)])
    text += (
        f"\n{len(of_fp8)} have weights or KV in fp8, MXFP8 included; {alone} of these are served, "
        "which were refused for fp8 alone if it were.\n\n"
    )
    rows = [
        (each.path, ", ".join(sorted(each.reasons)) or "served", "fp8" if each.fp8 else "")
        for each in (scripts if with_list else of_fp8)
    ]
    return text + table(("script", "refused for", "fp8"), rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer", choices=("verl", "nemo-rl"))
    parser.add_argument("checkout", type=Path, help="root of the trainer's repository")
    parser.add_argument("--list", action="store_true", help="each script, not only those with fp8")
    arguments = parser.parse_args()
    scripts = [*scripts_of(arguments.trainer, arguments.checkout)]
    print(count(arguments.trainer, arguments.checkout, scripts, arguments.list))


if __name__ == "__main__":
    main()
