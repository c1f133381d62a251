"""Options that put an advice into practice, ready to paste. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pat_vllm.advice.advice import Advice
from pat_vllm.advice.engines import DRAFTER, Engines
from pat_vllm.predictor.draft_schedule import Schedule, ngram_config

CHECKPOINT, STATE_DIR = "CHECKPOINT", "/PATH/state"
PLACEHOLDERS = {
    CHECKPOINT: "the model's directory, or its name on Hugging Face",
    DRAFTER: "the drafter's directory, or its name on Hugging Face",
    STATE_DIR: "a directory that the engine may write: what it learns, for the next engine",
}
"""What a user has to put in place of names in the settings."""

_VERL = "actor_rollout_ref.rollout"
_VLLM_IN_VERL = f"{_VERL}.engine_kwargs.vllm"
_OF_OPENRLHF = "128 requests and 2048 tokens a step"
"""vLLM's own limits for engines that are made as OpenRLHF 0.11.2 makes them."""


def settings(
    advice: Advice, model: str, max_num_seqs: int | None = None, profile: str | None = None
) -> dict[str, str]:
    """How to ask for what is advised: for `LLM`, `vllm serve`, VeRL and OpenRLHF, by name.

    Args:
        model: checkpoint, as vLLM takes it.
        max_num_seqs: of a rank; None: as the engine has it that was profiled.
        profile: file of the engine's profile, where it was measured.
    """
    engines, best = advice.engines, advice.best
    text_only = engines.text_only or None
    if advice.pays:
        policy = {"kind": "predictor", **({"profile": profile} if profile else {})}
        # Named, since the load of the advice is not the one that an engine expects by itself.
        pat = {**engines.options, "policy": policy, "state_dir": STATE_DIR}
        longest = engines.draft_lengths[-1]
        options = {
            "tensor_parallel_size": engines.ranks,
            "language_model_only": text_only,
            "distributed_executor_backend": "pat",
            "max_num_seqs": max_num_seqs,
            **engines.dtypes,
            "speculative_config": _drafts_up_to(engines, longest) if longest else None,
            "additional_config": {"pat": pat},
        }
        return _forms(model, options, engines=1, mixture=False)
    spread = engines.experts == "ep" and best.layout.tp > 1
    schedule = advice.schedules[best]
    options = {
        "tensor_parallel_size": best.layout.tp,
        "language_model_only": text_only,
        "enable_expert_parallel": spread or None,
        # As many requests as PAT's replicas of this layout, with which it was computed.
        "max_num_seqs": schedule[-1][1],
        **engines.dtypes,
        "speculative_config": _drafts(engines, schedule),
    }
    return _forms(model, options, best.layout.replicas, engines.experts is not None)


def _drafts_up_to(engines: Engines, longest: int) -> dict[str, Any]:
    """`speculative_config` for drafts of up to `longest` tokens."""
    return engines.drafter.config(longest) if engines.drafter else ngram_config(longest)


def _drafts(engines: Engines, schedule: Schedule) -> dict[str, Any] | None:
    """`speculative_config` of static engines."""
    longest = max(k for *_, k in schedule)
    if not longest:
        return None
    table = {"num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule]}
    return _drafts_up_to(engines, longest) | (table if len(schedule) > 1 else {})


def _forms(model: str, options: Mapping[str, Any], engines: int, mixture: bool) -> dict[str, str]:
    """vLLM's engine options in each form, those that are None left out."""
    options = {name: value for name, value in options.items() if value is not None}
    each = f"# {engines} engines like this\n" if engines > 1 else ""
    call = [repr(model), *(f"{name}={_python(value)}" for name, value in options.items())]
    serve = [f"vllm serve {model}", *(_flag(name, value) for name, value in options.items())]
    # vLLM would share a mixture's experts out among data-parallel ranks.
    if engines > 1 and not mixture:
        serve.insert(2, f"--data-parallel-size {engines}")
    return {
        "LLM": f"{each}LLM(\n{''.join(f'    {argument},' + chr(10) for argument in call)})",
        "vllm serve": (each if mixture else "") + _joined(serve),
        "VeRL": _joined(_verl(options)),
        "OpenRLHF": _openrlhf(options, engines),
    }


def _verl(options: Mapping[str, Any]) -> Iterator[str]:
    pat = options.get("additional_config", {}).get("pat", {})
    yield f"{_VERL}.name={'pat' if pat else 'vllm'}"
    yield f"{_VERL}.tensor_model_parallel_size={options['tensor_parallel_size']}"
    if "enable_expert_parallel" in options:
        yield f"{_VERL}.expert_parallel_size={options['tensor_parallel_size']}"
    if "max_num_seqs" in options:
        yield f"{_VERL}.max_num_seqs={options['max_num_seqs']}"
    if "language_model_only" in options:
        yield f"+{_VLLM_IN_VERL}.language_model_only=true"
    if str(options.get("quantization")).startswith("fp8"):
        yield f"{_VERL}.quantization=fp8"  # VeRL's own, by blocks
    if "kv_cache_dtype" in options:
        yield f"+{_VLLM_IN_VERL}.kv_cache_dtype={options['kv_cache_dtype']}"
    if drafts := options.get("speculative_config"):
        yield f"+{_VLLM_IN_VERL}.speculative_config='{_hydra(drafts)}'"
    for name, value in pat.items():
        yield f"+{_VLLM_IN_VERL}.additional_config.pat.{name}='{_hydra(value)}'"


def _openrlhf(options: Mapping[str, Any], engines: int) -> str:
    pat, drafts = options.get("additional_config", {}).get("pat"), options.get("speculative_config")
    words = ["--vllm_engine pat"] if pat else []
    words += [f"--vllm.num_engines {engines}"]
    words += [f"--vllm.tensor_parallel_size {options['tensor_parallel_size']}"]
    notes = ""
    if "enable_expert_parallel" in options:
        notes += "# with enable_expert_parallel of vLLM's\n"
    if "language_model_only" in options:
        notes += "# WITHOUT language_model_only=True of the other forms: OpenRLHF has no option\n"
    for name in ("quantization", "kv_cache_dtype"):
        if name in options:
            notes += (
                f"# WITHOUT {name}={options[name]} of the other forms: OpenRLHF has no option\n"
            )
    if pat and drafts:
        words.append(f"--vllm.speculative_config '{json.dumps(drafts)}'")
    elif drafts:
        notes += "# WITHOUT the drafts of the other forms: OpenRLHF has no option for them\n"
    if "max_num_seqs" in options:
        of = "a GPU" if pat else "an engine"
        notes += (
            f"# WITHOUT max_num_seqs={options['max_num_seqs']} of the other forms, with which it "
            f"was computed: OpenRLHF has no option for it, and leaves {of} vLLM's {_OF_OPENRLHF}\n"
        )
    if pat:
        words.append(f"--vllm.pat '{json.dumps(pat)}'")
    return notes + _joined(words)


def _python(value: Any) -> str:
    return repr(value) if isinstance(value, bool) else json.dumps(value)


def _flag(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    return (
        f"{option} {value}" if isinstance(value, str | int) else f"{option} '{json.dumps(value)}'"
    )


def _joined(parts: Iterable[str]) -> str:
    """Arguments of a shell command."""
    return " \\\n    ".join(parts)


def _hydra(value: Any) -> str:
    """A value in Hydra's syntax: like JSON, without quotes."""
    return json.dumps(value, separators=(",", ":")).replace('"', "")
