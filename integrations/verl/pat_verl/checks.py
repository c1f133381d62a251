"""What PAT cannot serve of verl's options. Imports neither verl nor vLLM."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.files.reading import read_json_object
from pat_vllm.models.drafters import instead_of, is_mtp

NAME = "pat"
"""Value of `rollout.name` that asks for PAT; also vLLM's name of the executor backend."""

TESTED_VERL = ("0.9", "0.10")
"""verl versions that this works with: from the first, up to but without the second."""

ALLOW_UNTESTED = "PAT_ALLOW_UNTESTED_VERL"
"""Environment variable that lets it run with another verl when set to 1."""

Refused = list[tuple[str, Any, str]]
"""Options that PAT cannot serve: (option, value, way out)."""

_KWARGS = "engine_kwargs.vllm"
_ENABLED = f"{_KWARGS}.additional_config.pat.enabled"
_SPECULATE = (
    f"+actor_rollout_ref.rollout.{_KWARGS}.speculative_config="
    "'{method:ngram,num_speculative_tokens:4,prompt_lookup_max:4}'"
)


def asks_for_pat(rollout: Any) -> bool:
    """Whether a rollout config asks for PAT: as `rollout.name`, as vLLM's executor backend, or by
    PAT's option `enabled`, which counts for more than the backend."""
    enabled = _enabled(rollout)
    by_vllm = _backend(rollout) == NAME if enabled is None else enabled is True
    return _get(rollout, "name") == NAME or by_vllm


def check_verl_version(version: str) -> None:
    """Refuse a verl that this was not tested with.

    Raises:
        ValueError: the version is outside `TESTED_VERL`, and `PAT_ALLOW_UNTESTED_VERL` is not 1.
    """
    if os.environ.get(ALLOW_UNTESTED) == "1":
        return
    first, past = (tuple(int(n) for n in v.split(".")) for v in TESTED_VERL)
    try:
        installed = tuple(int(n) for n in version.split(".")[:2])
    except ValueError:
        installed = (0, 0)
    if not first <= installed < past:
        raise ValueError(
            f"rollout.name={NAME} is tested with verl >= {TESTED_VERL[0]}, < {TESTED_VERL[1]}, but "
            f"verl {version} is installed. Install a tested one (pip install --no-deps "
            f"verl==0.9.1), or set {ALLOW_UNTESTED}=1 to try this one."
        )


def check_rollout(
    rollout: Any,
    model: Any = None,
    gpus_per_node: int | None = None,
    world_size: int | None = None,
) -> None:
    """Check a rollout config that asks for PAT.

    Args:
        rollout: verl's `RolloutConfig`, or the same as a mapping.
        model: verl's `HFModelConfig`, or the same as a mapping.
        gpus_per_node: GPUs that the rollout, or the trainer that it shares them with, has on a
            node; None where it is not known yet.
        world_size: the same over all nodes.

    Raises:
        ValueError: an option that PAT cannot serve; names it, its value and the way out.
    """
    refused = refused_of(rollout, model, gpus_per_node, world_size)
    if refused:
        asked = f"rollout.name={NAME}"
        if _get(rollout, "name") != NAME:
            asked = f"rollout.{_KWARGS}.distributed_executor_backend={NAME}"
            if _enabled(rollout):
                asked = f"rollout.{_ENABLED}=true"
        problems = (f"{option}={_shown(value)} ({way_out})" for option, value, way_out in refused)
        raise ValueError(f"{asked} does not work with " + "; ".join(problems))
    pat_options(rollout).resolve_layouts(_number(rollout, "tensor_model_parallel_size"))


def refused_of(
    rollout: Any,
    model: Any = None,
    gpus_per_node: int | None = None,
    world_size: int | None = None,
) -> Refused:
    """What PAT cannot serve of a rollout config; the arguments are those of `check_rollout`."""
    return _options(rollout, model) + _sizes(rollout, _num_heads(model), gpus_per_node, world_size)


def pat_options(rollout: Any) -> PATConfig:
    """The validated PAT options of a rollout config.

    Raises:
        ValueError: an option is unknown or has a wrong value.
    """
    additional = _get(rollout, f"{_KWARGS}.additional_config")
    if additional is not None and not hasattr(additional, "get"):
        raise ValueError(
            f"rollout.{_KWARGS}.additional_config must be a mapping, got {additional!r}; "
            f"write +actor_rollout_ref.rollout.{_KWARGS}.additional_config.pat.OPTION=VALUE"
        )
    return PATConfig.parse(plain(_get(additional, "pat")))


def speculative_config(rollout: Any) -> dict[str, Any] | None:
    """vLLM's speculative config in a rollout config, a mapping or a JSON text; None without one.

    Raises:
        ValueError: it is neither.
    """
    given = _parsed(_get(rollout, f"{_KWARGS}.speculative_config"))
    if given is not None and not hasattr(given, "items"):
        raise ValueError(
            f"rollout.{_KWARGS}.speculative_config must be a mapping, got {given!r}; write "
            f"{_SPECULATE}"
        )
    return plain(given)


def _drafts_by_mtp(rollout: Any) -> bool:
    """Whether verl itself names a method of drafts to vLLM, in `mtp.method`."""
    return bool(_get(rollout, "mtp.enable")) and bool(_get(rollout, "mtp.enable_rollout"))


def plain(value: Any) -> Any:
    """Mappings and lists of OmegaConf as dicts and lists."""
    if hasattr(value, "items"):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) or type(value).__name__ == "ListConfig":
        return [plain(item) for item in value]
    return value


def _options(rollout: Any, model: Any) -> Refused:
    """Options that PAT cannot serve, but for the number of GPUs."""
    problems: Refused = []

    def refuse(option: str, way_out: str, when: bool = True, value: Any = None) -> None:
        if when:
            shown = _get(rollout, option) if value is None else value
            problems.append((f"rollout.{option}", shown, way_out))

    replicas = "PAT makes replicas of the ranks by itself: set 1, and name all GPUs of a node in "
    replicas += "rollout.tensor_model_parallel_size"
    for option in (
        "data_parallel_size",
        "pipeline_model_parallel_size",
        "expert_parallel_size",
        f"{_KWARGS}.data_parallel_size",
        f"{_KWARGS}.pipeline_parallel_size",
    ):
        refuse(option, replicas, _number(rollout, option) != 1)
    refuse(
        f"{_KWARGS}.nnodes",
        "an engine stays inside a node: leave it out, and more nodes get more PAT engines",
        _number(rollout, f"{_KWARGS}.nnodes") != 1,
    )
    tp = _number(rollout, "tensor_model_parallel_size")
    refuse(
        f"{_KWARGS}.tensor_parallel_size",
        f"it must equal rollout.tensor_model_parallel_size={tp}: leave it out",
        _number(rollout, f"{_KWARGS}.tensor_parallel_size", tp) != tp,
    )
    refuse(
        f"{_KWARGS}.distributed_executor_backend",
        "leave it out, since PAT sets it, or choose rollout.name=vllm without PAT's options",
        _backend(rollout) not in (None, NAME),
    )
    refuse(
        _ENABLED,
        "set rollout.name=vllm and the rollout.tensor_model_parallel_size that you want without "
        "PAT",
        pat_options(rollout).enabled is False,
    )
    refuse(
        f"{_KWARGS}.additional_config.pat.launcher",
        "verl's server starts the workers itself: leave it out",
        pat_options(rollout).launcher == "ray",
    )
    refuse(
        "disaggregation.enabled",
        "prefill and decode share PAT's ranks: set False",
        bool(_get(rollout, "disaggregation.enabled")),
    )
    refuse(
        "checkpoint_engine.backend",
        "weights must arrive whole for every layout to be derived from them: choose naive, nccl "
        "or another backend that sends full tensors",
        _get(rollout, "checkpoint_engine.backend") == "delta_sharded",
    )
    refuse(
        "quantization",
        "PAT's layouts cannot share weights in its form: set fp8 or null",
        _get(rollout, "quantization") not in (None, "fp8"),
    )
    refuse(
        "qat.enable",
        "PAT's layouts cannot share weights of 4 bits: set False",
        bool(_get(rollout, "qat.enable")),
    )
    own = speculative_config(rollout) or {}
    method = own.get("method")
    if allowed := instead_of(method):
        refuse(f"{_KWARGS}.speculative_config.method", allowed, value=method)
    if method is None and _drafts_by_mtp(rollout):
        method = _get(rollout, "mtp.method")
        if allowed := instead_of(method):
            refuse("mtp.method", f"{allowed}; or set rollout.mtp.enable_rollout=False")
    refuse(
        "quantization",
        "its MTP module would be quantized, too, which layouts cannot share yet: set null, or "
        "rollout.mtp.enable_rollout=False",
        _get(rollout, "quantization") == "fp8" and is_mtp(method) and "model" not in own,
    )
    refuse(
        "enable_rollout_routing_replay",
        "PAT does not hand on which experts were chosen: set False",
        bool(_get(rollout, "enable_rollout_routing_replay")),
    )

    rank = _number(model, "lora.rank", 0) or _number(model, "lora_rank", 0)
    if rank > 0 and not _get(model, "lora.merge"):
        problems.append(
            (
                "model.lora_rank",
                rank,
                "adapters cannot be served with PAT: set model.lora.merge=true, which sends the "
                "merged weights",
            )
        )
    return problems


def _sizes(
    rollout: Any, heads: int | None, gpus_per_node: int | None, world_size: int | None
) -> Refused:
    """The number of an engine's GPUs, if PAT cannot serve it."""
    option = "rollout.tensor_model_parallel_size"
    tp = _number(rollout, "tensor_model_parallel_size")
    if tp < 2:
        way_out = (
            "it must be at least 2, since PAT makes replicas of the GPUs of one engine: name all "
            "GPUs of a node, or set rollout.name=vllm"
        )
        return [(option, tp, way_out)]
    allowed = _allowed(_widths(gpus_per_node, heads))
    if gpus_per_node is not None and (tp > gpus_per_node or gpus_per_node % tp):
        way_out = f"an engine stays inside a node: {allowed}; more nodes get more PAT engines"
        return [(option, f"{tp} on nodes with {gpus_per_node} GPUs", way_out)]
    if heads is not None and heads % tp:
        way_out = f"each rank has as many of them: {allowed}; a node gets more PAT engines"
        return [(option, f"{tp} with a model of {heads} attention heads", way_out)]
    if world_size is not None and world_size % tp:
        way_out = f"each must belong to an engine: {_allowed(_widths(world_size, heads))}"
        return [(option, f"{tp} on {world_size} GPUs", way_out)]
    return []


def advice_on_width(rollout: Any, model: Any, gpus_per_node: int) -> str | None:
    """What to say of engines that are narrower than a node could have; None: nothing."""
    tp = _number(rollout, "tensor_model_parallel_size")
    best = max(_widths(gpus_per_node, _num_heads(model)), default=tp)
    if tp >= best:
        return None
    return (
        f"rollout.tensor_model_parallel_size={tp}: a PAT engine over {tp} of the {gpus_per_node} "
        f"GPUs of a node chooses among layouts of {tp}. Best is {best}"
    )


def _num_heads(model: Any) -> int | None:
    """Attention heads of a model, where they are known: its config is loaded, or on this disk."""
    config = _get(model, "hf_config")
    path = _get(model, "hf_config_path") or _get(model, "path")
    if config is None and isinstance(path, str) and os.path.isdir(path):
        with contextlib.suppress(ValueError):  # verl says what is wrong with it
            config = read_json_object(os.path.join(path, "config.json"))
    for place in ("text_config.num_attention_heads", "num_attention_heads"):
        if isinstance(heads := _get(config, place), int) and heads > 0:
            return heads
    return None


def _widths(*numbers: int | None) -> list[int]:
    """Tensor-parallel sizes of PAT's engines that divide all of these numbers that are known,
    ascending; none where nothing is known."""
    common = math.gcd(*(number or 0 for number in numbers))
    return [tp for tp in range(2, common + 1) if common % tp == 0]


def _allowed(widths: list[int]) -> str:
    return f"allowed {widths}, best {widths[-1]}" if widths else "none, set rollout.name=vllm"


def _backend(rollout: Any) -> Any:
    return _get(rollout, f"{_KWARGS}.distributed_executor_backend")


def _enabled(rollout: Any) -> Any:
    return _get(_parsed(_get(rollout, f"{_KWARGS}.additional_config")), "pat.enabled")


def _parsed(value: Any) -> Any:
    """The value of a JSON text, as vLLM takes one; anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            return json.loads(value)
    return value


def _number(config: Any, path: str, default: int = 1) -> int:
    value = _get(config, path)
    return default if value is None else int(value)


def _get(config: Any, path: str) -> Any:
    """The value at a dotted path through attributes and mappings, or None."""
    for name in path.split("."):
        if config is None:
            return None
        if isinstance(config, Mapping) or hasattr(config, "items"):
            config = config.get(name)
        else:
            config = getattr(config, name, None)
    return config


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
