"""Options that put an advice into practice, ready to paste. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pat_vllm.advice.sides import PLAIN, TUNED
from pat_vllm.advice.verdict import Advice
from pat_vllm.layout import Experts

_LENGTHS_FILE = "/PATH/lengths.json"
_VERL = "actor_rollout_ref.rollout"
_VLLM_IN_VERL = f"{_VERL}.engine_kwargs.vllm"


def settings(
    advice: Advice, model: str, max_num_seqs: int | None = None, profile: str | None = None
) -> dict[str, str]:
    """How to ask for what is advised: for `LLM`, `vllm serve`, VeRL and OpenRLHF, by name.

    Args:
        model: checkpoint, as vLLM takes it.
        max_num_seqs: of a rank; None: as the engine has it that was profiled.
        profile: file of the engine's profile, where it was measured.
    """
    if advice.pays:
        drafts = _ngram(advice.rollouts.draft_lengths[-1]) if advice.drafts else None
        engine = _Engine(model, advice.rollouts.profile.ranks, 1, max_num_seqs, drafts)
        return engine.settings(pat_options(advice, profile))
    layout = advice.sides.static.side.layout
    assert layout is not None
    # What it was simulated with: as many requests as PAT's replicas of this layout.
    engines = advice.rollouts.static
    seqs = engines.max_num_seqs[layout.tp]
    mixture = None if engines.experts is None else layout.experts
    drafts = _drafts(advice)
    return _Engine(model, layout.tp, layout.replicas, seqs, drafts, mixture).settings(None)


def pat_options(advice: Advice, profile: str | None = None) -> dict[str, Any]:
    """`additional_config["pat"]`."""
    engine = advice.rollouts.profile
    sizes = list(dict.fromkeys(layout.tp for layout in engine.layouts))
    # Named, since the load of the advice is not the one that an engine expects by itself.
    options: dict[str, Any] = {"base_tp": sizes[0], "layouts": sizes}
    kinds = {layout.experts for layout in engine.layouts if layout.tp > 1}
    if engine.experts:
        options["experts"] = kinds.pop() if len(kinds) == 1 else "both"
    named = {"profile": profile} if profile else {}
    policy = {"kind": "predictor", **named, "lengths_file": _LENGTHS_FILE}
    return {**options, "policy": policy}


def _drafts(advice: Advice) -> dict[str, Any] | None:
    """`speculative_config` of the best static layout."""
    static = advice.sides.static.side
    assert static.layout is not None
    if static.drafts == PLAIN:
        return None
    if static.drafts != TUNED:
        return _ngram(int(static.drafts.removeprefix("k = ")))
    schedule = [list(entry) for entry in advice.rollouts.schedule(static.layout, TUNED)]
    return {
        **_ngram(max(1, *(k for *_, k in schedule))),
        "num_speculative_tokens_per_batch_size": schedule,
    }


def _ngram(tokens: int) -> dict[str, Any]:
    return {
        "method": "ngram",
        "num_speculative_tokens": tokens,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


@dataclass(frozen=True)
class _Engine:
    """An engine's options.

    Attributes:
        tp: `tensor_parallel_size`.
        engines: how many of them.
        drafts: `speculative_config`.
        experts: of a mixture, how a static layout has them.
    """

    model: str
    tp: int
    engines: int
    max_num_seqs: int | None
    drafts: dict[str, Any] | None
    experts: Experts | None = None

    def settings(self, pat: dict[str, Any] | None) -> dict[str, str]:
        """By whom it is started; `pat` are PAT's options, None without PAT."""
        arguments = [repr(self.model), f"tensor_parallel_size={self.tp}"]
        serve = [f"vllm serve {self.model} --tensor-parallel-size {self.tp}"]
        verl = [
            f"{_VERL}.name={'vllm' if pat is None else 'pat'} "
            f"{_VERL}.tensor_model_parallel_size={self.tp}"
        ]
        openrlhf = [
            f"{'' if pat is None else '--vllm_engine pat '}--vllm.num_engines {self.engines} "
            f"--vllm.tensor_parallel_size {self.tp}"
        ]
        if pat is not None:
            arguments.append('distributed_executor_backend="pat"')
            serve[0] += " --distributed-executor-backend pat"
        elif self.engines > 1 and self.experts is None:
            serve[0] += f" --data-parallel-size {self.engines}"
        if self.experts == "ep":
            arguments.append("enable_expert_parallel=True")
            serve.append("--enable-expert-parallel")
            verl.append(f"{_VERL}.expert_parallel_size={self.tp}")
        if self.max_num_seqs is not None:
            arguments.append(f"max_num_seqs={self.max_num_seqs}")
            serve.append(f"--max-num-seqs {self.max_num_seqs}")
            verl.append(f"{_VERL}.max_num_seqs={self.max_num_seqs}")
        if self.drafts is not None:
            drafts = json.dumps(self.drafts)
            arguments.append(f"speculative_config={drafts}")
            serve.append(f"--speculative-config '{drafts}'")
            verl.append(f"+{_VLLM_IN_VERL}.speculative_config='{_hydra(self.drafts)}'")
            if pat is not None:  # OpenRLHF itself has no such option
                openrlhf.append(f"--vllm.speculative_config '{drafts}'")
        if pat is not None:
            arguments.append(f"additional_config={json.dumps({'pat': pat})}")
            serve.append(f"--additional-config '{json.dumps({'pat': pat})}'")
            verl += [
                f"+{_VLLM_IN_VERL}.additional_config.pat.{name}='{_hydra(value)}'"
                for name, value in pat.items()
            ]
            openrlhf.append(f"--vllm.pat '{json.dumps(pat)}'")
        inside = "".join(f"    {one},\n" for one in arguments)
        each = f"# {self.engines} engines like this\n" if self.engines > 1 else ""
        # vLLM would share a mixture's experts out among data-parallel ranks.
        servers = "" if self.experts is None else each
        spread = "# with enable_expert_parallel of vLLM's\n" if self.experts == "ep" else ""
        return {
            "LLM": f"{each}LLM(\n{inside})",
            "vllm serve": servers + _joined(serve),
            "VeRL": _joined(verl),
            "OpenRLHF": spread + _joined(openrlhf),
        }


def _joined(parts: list[str]) -> str:
    """Arguments of a shell command."""
    return " \\\n    ".join(parts)


def _hydra(value: Any) -> str:
    """A value in Hydra's syntax: like JSON, without quotes."""
    return json.dumps(value, separators=(",", ":")).replace('"', "")
