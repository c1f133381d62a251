"""The stages, one after the other, until one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.doctor.arithmetic import check_memory, engine_shape
from pat_vllm.doctor.child import Run, run_module
from pat_vllm.doctor.compare import Reference
from pat_vllm.doctor.environment import FACTS, QUESTION, Facts, Question
from pat_vllm.doctor.session import REFERENCES, SESSION, Session
from pat_vllm.doctor.values import Check, Stage
from pat_vllm.memory.rank_memory import GPU

Doing = Callable[[str], None]
ENGINE_STAGES = ("eager", "piecewise", "full")
_GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
}
_GiB = 1 << 30
_PROCESS_BYTES = 600 << 20
"""Of host memory, about what each of an engine's processes takes on CPU with a tiny model."""


@dataclass(frozen=True)
class Models:
    """Two random models of one shape, for the self-test: folders, and the size of their vocabulary.

    Attributes:
        first, other: checkpoints.
        vocab: ids of prompts are below it.
        draft_lengths: to go through, where the engine is to speculate.
    """

    first: Path
    other: Path
    vocab: int
    draft_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What to look at.

    Attributes:
        ranks: of the engine.
        pat: options of PAT's, of a user's engine.
        engine: further options of vLLM's.
        model: folder of a user's model, or None.
        gpu: to compute memory for; None: those that are found.
        machine: whether the machine at hand is to be tested, or only `gpu` to be computed for.
        dtype: of the self-test; None: float32 on CPU, else bfloat16.
        all: whether to test compiled engines, too.
        environment: of the processes, by the number of their engine's ranks.
    """

    ranks: int
    pat: dict[str, Any]
    engine: dict[str, Any]
    model: Path | None
    gpu: GPU | None
    machine: bool
    dtype: str | None
    all: bool
    environment: Callable[[int], Mapping[str, str]]
    prompts: tuple[tuple[int, ...], ...] = field(default=())
    max_tokens: int = 48


def run_stages(plan: Plan, make_models: Callable[[], Models], doing: Doing) -> Iterable[Stage]:
    """Run the stages; each is handed out when it has ended. After one that fails, none is run.

    Args:
        make_models: called when a stage needs them.
        doing: called with what is being done, as "stage: what".
    """
    run = _Stages(plan, make_models, doing)
    names = ["environment", "model", "memory", *ENGINE_STAGES]
    failed = None
    for name in names:
        if failed is not None:
            yield Stage.skipped(name, f"'{failed}' failed")
            continue
        stage = run.run(name)
        failed = name if stage.status == "failed" else None
        yield stage


class _Stages:
    """What one stage leaves for the next."""

    def __init__(self, plan: Plan, make_models: Callable[[], Models], doing: Doing) -> None:
        self._plan = plan
        self._make_models = make_models
        self._doing = doing
        self._facts: Facts | None = None
        self._models: Models | None = None
        self._references: tuple[Reference, ...] = ()
        self._log = ""

    def run(self, name: str) -> Stage:
        began = time.monotonic()
        self._log = ""
        self._doing(name)
        if name in ENGINE_STAGES:
            if (why := self._why_not(name)) is not None:
                return Stage.skipped(name, why)
            checks = self._engine(name)
        elif name == "environment":
            checks = self._environment()
        elif self._plan.model is None:
            return Stage.skipped(name, "no --model is given")
        elif name == "model":
            checks = [self._refusal()]
        else:
            gpu = self._gpu()
            if gpu is None:
                return Stage.skipped(name, "no GPU is here; --gpu names one to compute for")
            checks = [self._memory(gpu)]
        return Stage.of(name, checks, round(time.monotonic() - began, 2), self._log)

    def _child(self, name: str, module: str, request: bytes, ranks: int) -> Run:
        run = run_module(
            f"pat_vllm.doctor.{module}",
            request.decode(),
            self._plan.environment(ranks),
            lambda what: self._doing(f"{name}: {what}"),
        )
        self._log = run.log
        return run

    # ---------------------------------------------------------------- without an engine

    def _environment(self) -> list[Check]:
        plan = self._plan
        model = plan.model
        if model is None:
            self._doing("environment: making a random model")
            self._models = self._make_models()
            model = self._models.first
        question = Question(
            {
                **plan.engine,
                "model": str(model),
                "skip_tokenizer_init": True,
                "tensor_parallel_size": plan.ranks,
                "distributed_executor_backend": "pat",
                "additional_config": {"pat": plan.pat},
            },
        )
        run = self._child("environment", "environment", QUESTION.dump_json(question), plan.ranks)
        if run.answer is None:
            return list(run.checks)
        self._facts = facts = FACTS.validate_json(run.answer)
        checks = environment_checks(facts, plan.ranks, plan.machine)
        if plan.model is None and facts.refused is not None:
            checks.append(Check("options", problem=facts.refused))
        return [*checks, *run.checks]

    def _refusal(self) -> Check:
        assert self._facts is not None
        refused = self._facts.refused
        return Check("options", "" if refused else "PAT runs it", refused)

    def _gpu(self) -> GPU | None:
        assert self._facts is not None
        if self._plan.gpu is not None:
            return self._plan.gpu
        devices = self._facts.devices
        if not devices:
            return None
        least = min(devices, key=lambda one: one.memory)
        return GPU(least.memory, least.capability.startswith("9."))

    def _memory(self, gpu: GPU) -> Check:
        assert self._facts is not None
        config = self._facts.config
        pat = PATConfig.parse(self._plan.pat)
        shape = engine_shape(config, pat, self._plan.ranks, self._plan.engine)
        if self._facts.platform == "cpu":
            return check_memory(config, gpu, shape)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return check_memory(config, gpu, shape, dtype.removeprefix("torch."))

    # ---------------------------------------------------------------- with engines

    def _why_not(self, name: str) -> str | None:
        assert self._facts is not None
        if not self._plan.machine:
            return "--gpu computes for another machine; leave it out to test this one"
        if name != "eager" and not self._plan.all:
            return "only with --all"
        if name != "eager" and self._facts.platform == "cpu":
            return "a CPU has no CUDA graphs"
        return None

    def _engine(self, name: str) -> list[Check]:
        plan = self._plan
        assert self._facts is not None
        if self._models is None:
            self._doing(f"{name}: making random models")
            self._models = self._make_models()
        on_cpu = self._facts.platform == "cpu"
        stock = self_test_engine(self._models, plan, on_cpu)
        checks: list[Check] = []
        session = Session(
            stock,
            str(self._models.other),
            plan.prompts or prompts(self._models.vocab),
            plan.max_tokens,
        )
        if not self._references:
            run = self._child(name, "session", SESSION.dump_json(session), 1)
            checks += run.checks
            if run.answer is None:
                return checks
            self._references = REFERENCES.validate_json(run.answer)
        session = with_pat(session, plan, _GRAPHS[name], self._models, self._references, on_cpu)
        run = self._child(name, "session", SESSION.dump_json(session), plan.ranks)
        return [*checks, *run.checks]


def environment_checks(facts: Facts, ranks: int, machine: bool) -> list[Check]:
    """What the facts say of this machine.

    Args:
        machine: whether an engine of so many ranks is to be started on it.
    """
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    checks = [Check("versions", versions, values=dict(facts.versions))]
    cpu = facts.cpu
    checks.append(Check("CPU", f"{cpu['kind']}, {cpu['numa_nodes']} NUMA node(s)"))
    memory = f"{facts.free / _GiB:.1f} of {facts.memory / _GiB:.1f} GiB free"
    need = (ranks + 2) * _PROCESS_BYTES
    short = facts.platform == "cpu" and machine and facts.free < need
    problem = (
        f"too little memory: {ranks} ranks on CPU need about {need / _GiB:.1f} GiB, {memory}"
        if short
        else None
    )
    checks.append(Check("host memory", memory, problem))
    if facts.platform != "cpu":
        checks += _device_checks(facts, ranks, machine)
    if facts.refused is None:
        chosen = f"attention {facts.attention}, model runner {facts.runner}"
        checks.append(Check("vLLM would choose", f"{facts.platform}: {chosen}"))
    return checks


def _device_checks(facts: Facts, ranks: int, machine: bool) -> list[Check]:
    counted: dict[str, int] = {}
    for one in facts.devices:
        text = f"{one.name} ({one.memory / _GiB:.0f} GiB, {one.capability})"
        counted[text] = counted.get(text, 0) + 1
    kinds = ", ".join(f"{count} x {text}" for text, count in counted.items()) or "none"
    few = machine and len(facts.devices) < ranks
    problem = f"--ranks {ranks} needs as many GPUs, {len(facts.devices)} are here" if few else None
    apart = [
        f"{a}-{b}"
        for a, row in enumerate(facts.peers)
        for b, reaches in enumerate(row)
        if a < b and not (reaches and facts.peers[b][a])
    ]
    links = "every GPU reaches every other's memory"
    if apart:
        links = f"no peer access between {', '.join(apart)}: slow, by way of the host"
    busy = [
        f"GPU {index}: {one.free / _GiB:.1f} GiB free"
        for index, one in enumerate(facts.devices)
        if one.free < 0.9 * one.memory
    ]
    matrix = [[int(one) for one in row] for row in facts.peers]
    return [
        Check("GPUs", "; ".join([kinds, *busy]), problem),
        Check("links", links, values={"peer_access": matrix}),
    ]


def prompts(vocab: int, count: int = 6) -> tuple[tuple[int, ...], ...]:
    """Of the self-test's requests: 10 to 40 tokens."""
    import random

    rng = random.Random(0)
    return tuple(
        tuple(rng.randrange(3, vocab) for _ in range(rng.randint(10, 40))) for _ in range(count)
    )


def self_test_engine(models: Models, plan: Plan, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for stock vLLM, which everything is compared with."""
    engine: dict[str, Any] = {
        "model": str(models.first),
        "dtype": plan.dtype or ("float32" if on_cpu else "bfloat16"),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 256 << 20,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    return {**engine, **_for_both(plan.engine)}


def _for_both(given: Mapping[str, Any]) -> dict[str, Any]:
    """A user's options that stock vLLM gets, too."""
    only_pat = ("worker_extension_cls", "compilation_config", "enforce_eager", "max_model_len")
    return {name: value for name, value in given.items() if name not in only_pat}


def with_pat(
    session: Session,
    plan: Plan,
    graphs: Mapping[str, Any],
    models: Models,
    references: tuple[Reference, ...],
    on_cpu: bool,
) -> Session:
    """The session of an engine with PAT on the same requests."""
    base, *_ = PATConfig.parse(plan.pat).resolve_layouts(plan.ranks)
    pat = {**plan.pat, "policy": {"kind": "static", "tp": base.tp}}
    if on_cpu:
        # So that weights can be updated, and rows change places as on GPUs.
        pat["weights"] = "inplace"
    engine = {**session.engine, **plan.engine}
    if "compilation_config" in graphs:
        engine.pop("enforce_eager", None)
    engine |= {
        **graphs,
        "max_model_len": session.engine["max_model_len"],
        "tensor_parallel_size": plan.ranks,
        "distributed_executor_backend": "pat",
        "additional_config": {"pat": pat},
    }
    if not on_cpu:
        engine["enable_sleep_mode"] = True
    if models.draft_lengths:
        engine["speculative_config"] = {
            "method": "ngram",
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
            "num_speculative_tokens": max(models.draft_lengths),
        }
    with suppress(KeyError):
        engine["compilation_config"] = {
            **plan.engine["compilation_config"],
            **graphs["compilation_config"],
        }
    return Session(
        engine,
        session.other_weights,
        session.prompts,
        session.max_tokens,
        references,
        models.draft_lengths,
    )
