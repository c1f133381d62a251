"""What a checkpoint's `config.json` says, for tools that run without vLLM (`advise`).

It reads files, and imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pat_vllm.files.reading import read_json, read_json_object, shown
from pat_vllm.models.images import SERVED
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.layer_sizes import text_of
from pat_vllm.models.model_classes import class_name, known_class
from pat_vllm.models.model_rules import ModelFacts, refusal, refused_of
from pat_vllm.models.quantization import quantization_config

WithDefaults = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""A function that completes a `config.json`: it returns the fields of the text model, with those
that the file leaves out, and as `vision_config` those of its tower; None if it does not know
them."""


class NamedConfig(NamedTuple):
    """The fields of a model's text model, with the quantization of the whole, and what to call it.

    Attributes:
        text_only: whether the model takes more than text, of which PAT serves the text alone.
        with_tower: its `config.json` with the sizes of its tower, if PAT serves it with images.
    """

    fields: Mapping[str, Any]
    name: str
    text_only: bool = False
    with_tower: Mapping[str, Any] | None = None


def named_config(model: str, with_defaults: WithDefaults = lambda config: None) -> NamedConfig:
    """Find a model by a checkpoint's directory, the path of its `config.json`, or a name in
    `MODEL_SHAPES`.

    Args:
        with_defaults: completes the file's fields, by transformers where that is installed.

    Raises:
        ValueError: it is unknown, its file cannot be read or leaves out what sizes depend on, or an
            engine with PAT refuses it.
    """
    if (path := config_file(model)) is None:
        if model not in MODEL_SHAPES:
            raise ValueError(
                f"model {shown(model)} is unknown; allowed are {', '.join(MODEL_SHAPES)}, or a "
                "path of a checkpoint or of its config.json"
            )
        return NamedConfig(MODEL_SHAPES[model], model)
    config = read_json_object(path, "model config")
    # As vLLM does: older versions of ModelOpt write the quantization to a file of its own.
    beside = path.with_name("hf_quant_config.json")
    if config.get("quantization_config") is None and beside.is_file():
        config["quantization_config"] = read_json_object(beside, "quantization")
    resolved = with_defaults(config)
    fields = text_of(config) if resolved is None else resolved
    facts = ModelFacts.of_file(model, config, fields, _pools(path.with_name("modules.json")))
    if refused := refused_of(facts):
        raise ValueError(refusal(refused))
    left_out = [] if resolved is not None else known_class(fields).left_out(fields)
    if left_out:
        raise ValueError(
            f"model config {path} leaves out {', '.join(left_out)}, whose values transformers "
            "knows, which is not installed or does not know the model; install it (pip install "
            "transformers), or write them into the file"
        )
    has_more = any(isinstance(config.get(part), dict) for part in ("text_config", "vision_config"))
    if (quantization := quantization_config(config)) is not None:
        fields = {**fields, "quantization_config": quantization}
    name = path.resolve().parent.name
    vision = fields.get("vision_config", config.get("vision_config"))
    if vision is None or class_name(config) not in SERVED:
        return NamedConfig(fields, name, has_more)
    return NamedConfig(
        fields, name, with_tower={**config, "text_config": fields, "vision_config": vision}
    )


class NamedDrafter(NamedTuple):
    """A drafter with weights.

    Attributes:
        method: vLLM's.
        fields: of its `config.json`; empty for the target's own MTP module.
        path: of its checkpoint; "" for that module.
    """

    method: str
    fields: Mapping[str, Any]
    path: str

    def config(self, longest: int) -> dict[str, Any]:
        """A `speculative_config` of vLLM's for drafts of up to `longest` tokens."""
        model = {"model": self.path} if self.path else {}
        return {"method": self.method, **model, "num_speculative_tokens": longest}


def named_drafter(drafter: str) -> NamedDrafter:
    """Find a drafter: "mtp", or the path of an EAGLE head's or a draft model's checkpoint.

    Raises:
        ValueError: it is none of these, or its file cannot be read.
    """
    if drafter == "mtp":
        return NamedDrafter("mtp", {}, "")
    if (path := config_file(drafter)) is None:
        raise ValueError(
            f"--drafter is {shown(drafter)}; allowed are mtp, of a model with an MTP module, or a "
            "path of an EAGLE head's or a draft model's checkpoint"
        )
    fields = read_json_object(path, "drafter's config")
    name = class_name(fields).lower()
    method = "eagle3" if "eagle3" in name else "eagle" if "eagle" in name else "draft_model"
    return NamedDrafter(method, fields, str(path.parent.resolve()))


def _pools(modules: Path) -> bool:
    """Whether a checkpoint is made for Sentence Transformers, by its list of modules."""
    found = read_json(modules, "modules") if modules.is_file() else None
    kinds = [each.get("type") for each in found or () if isinstance(each, dict)]
    return any(str(kind).endswith(".Pooling") for kind in kinds)


def config_file(model: str) -> Path | None:
    """Path of a checkpoint's `config.json`, if `model` names it or its directory; else None."""
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    return path if path.suffix == ".json" else None
