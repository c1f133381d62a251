"""The stages, one after the other, until one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.doctor.arithmetic import check_memory, engine_shape
from pat_vllm.doctor.child import Run, run_module
from pat_vllm.doctor.compare import Reference
from pat_vllm.doctor.device import MOVES, Moves
from pat_vllm.doctor.environment import FACTS, QUESTION, Facts, Question, environment_checks
from pat_vllm.doctor.figures import REQUESTS, figures
from pat_vllm.doctor.plan import Models, Plan, as_used, prompts, self_test, timed_engine, with_pat
from pat_vllm.doctor.session import REFERENCES, SESSION, Prompts
from pat_vllm.doctor.steps import MEASURED, STEPS, Measured, Steps
from pat_vllm.doctor.values import Check, Stage
from pat_vllm.gpus import Device

Doing = Callable[[str], None]
AS_USED = "as used"
ENGINE_STAGES = ("eager", "piecewise", "full", AS_USED)
FIGURES = "figures"
_GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
}


def run_stages(plan: Plan, make_models: Callable[[], Models], doing: Doing) -> Iterable[Stage]:
    """Run the stages; each is handed out when it has ended. After one that fails, none is run.

    Args:
        make_models: called when a stage needs them.
        doing: called with what is being done, as "stage: what".
    """
    run = _Stages(plan, make_models, doing)
    names = ["environment", "model", "memory", *ENGINE_STAGES, FIGURES]
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
        self._references: dict[Prompts, tuple[Reference, ...]] = {}
        self._log = ""

    def run(self, name: str) -> Stage:
        began = time.monotonic()
        self._log = ""
        self._doing(name)
        if name in (*ENGINE_STAGES, FIGURES):
            if (why := self._why_not(name)) is not None:
                return Stage.skipped(name, why)
            checks = self._figures() if name == FIGURES else self._engine(name)
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
            # Of the stages that compile, only on a GPU: on CPU it takes a C++ compiler minutes.
            self._plan.environment(ranks, name != "eager" and not self._on_cpu),
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

    def _gpu(self) -> Device | None:
        assert self._facts is not None
        if self._plan.gpu is not None:
            return self._plan.gpu
        devices = self._facts.devices
        if not devices:
            return None
        least = min(devices, key=lambda one: one.memory)
        return Device(least.memory, least.capability)

    def _memory(self, device: Device) -> Check:
        assert self._facts is not None
        config = self._facts.config
        pat = PATConfig.parse(self._plan.pat)
        dtype = "bfloat16"
        if self._facts.platform != "cpu":
            of_model = str(config.get("dtype") or config.get("torch_dtype") or dtype)
            dtype = of_model.removeprefix("torch.")
        shape, choice = engine_shape(
            config, pat, self._plan.ranks, self._plan.engine, device, dtype
        )
        return check_memory(config, device, shape, dtype, choice.found)

    # ---------------------------------------------------------------- with engines

    def _why_not(self, name: str) -> str | None:
        assert self._facts is not None
        if not self._plan.machine:
            return "--gpu computes for another machine; leave it out to test this one"
        if name == FIGURES:
            return None if self._plan.all or self._plan.figures else "only with --all or --figures"
        if name != "eager" and not self._plan.all:
            return "only with --all"
        if self._facts.graphs.get(name) == "NONE":
            asked = f"cudagraph_mode {name.upper()}"
            return f"not on this platform: of {asked}, vLLM makes NONE on {self._facts.platform}"
        return None

    @property
    def _on_cpu(self) -> bool:
        return self._facts is not None and self._facts.platform == "cpu"

    def _some_models(self, stage: str) -> Models:
        if self._models is None:
            self._doing(f"{stage}: making random models")
            self._models = self._make_models()
        return self._models

    def _engine(self, name: str) -> list[Check]:
        plan, models = self._plan, self._some_models(name)
        assert self._facts is not None
        checks: list[Check] = []
        if name == AS_USED:
            stock, session = as_used(models, plan, self._facts)
        else:
            stock = self_test(models, plan, self._on_cpu)
            session = with_pat(stock, plan, _GRAPHS[name], models, self._on_cpu)
        if (references := self._references.get(stock.prompts)) is None:
            run = self._child(name, "session", SESSION.dump_json(stock), 1)
            checks += run.checks
            if run.answer is None:
                return checks
            references = self._references[stock.prompts] = REFERENCES.validate_json(run.answer)
        session = replace(session, references=references)
        run = self._child(name, "session", SESSION.dump_json(session), plan.ranks)
        return [*checks, *run.checks]

    def _figures(self) -> list[Check]:
        """Of the devices, then of engines: stock vLLM with each layout's tp, and PAT."""
        plan, models = self._plan, self._some_models(FIGURES)
        assert self._facts is not None
        config = self._facts.config if plan.model is not None else None
        moves = Moves(
            config, plan.ranks, tuple(dict.fromkeys(layout.tp for layout in plan.layouts))
        )
        checks = list(self._child(FIGURES, "device", MOVES.dump_json(moves), plan.ranks).checks)
        if any(one.problem is not None for one in checks):
            return checks
        measured: dict[int | None, Measured] = {}
        for tp in (*moves.tps, None):
            ranks = plan.ranks if tp is None else tp
            label = "PAT" if tp is None else f"stock vLLM tp={tp}"
            engine = timed_engine(models, plan, self._on_cpu, tp)
            texts = prompts(models.vocab, max(REQUESTS) * plan.ranks)
            steps = Steps(engine, texts, REQUESTS, label)
            run = self._child(FIGURES, "steps", STEPS.dump_json(steps), ranks)
            checks += run.checks
            if run.answer is None:
                return checks
            measured[tp] = MEASURED.validate_json(run.answer)
        pat = measured.pop(None)
        stock = {tp: one for tp, one in measured.items() if tp is not None}
        memory_of = "a process" if self._on_cpu else "in use of a GPU"
        return [*checks, *figures(pat.layouts, pat, stock, memory_of)]
