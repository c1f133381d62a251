"""The stages, one after the other, until one fails."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.doctor.arithmetic import check_memory, engine_shape
from pat_vllm.doctor.child import environment, run_module
from pat_vllm.doctor.doctor_options import Options
from pat_vllm.doctor.engine import REFERENCES, TASK
from pat_vllm.doctor.environment import FACTS, EnvironmentFacts, environment_checks
from pat_vllm.doctor.report import WITHOUT_ENGINES, Check, Stage
from pat_vllm.doctor.tasks import Models, as_used, engine_as_given, self_test
from pat_vllm.start.gpus import GPUS, Device, gpu_named

AS_USED = "as used"
GRAPHS = {"eager": None, "piecewise": "PIECEWISE", "full": "FULL"}
"""The stages of small engines, each with its `cudagraph_mode`."""
STAGES = (*WITHOUT_ENGINES, *GRAPHS, AS_USED)
SILENCE = 420.0
"""Seconds without a sign of life, or a line of its log, after which a process is taken to hang."""

_DIED = re.compile(
    r"(?:Worker proc (?:VllmWorker-)?|RayWorkerProc rank=)(\w+) died unexpectedly"
    r"(?! \(exit code: 0\))(?: \(exit code: (-?\d+)\))?"
)
"""With exit code 0 a worker has ended by itself, after an error that is told elsewhere."""
_MEMORY = re.compile(
    r"^.*?((?:Free memory on device|No available memory for the cache blocks|"
    r"To serve at least one request|[\w.]*OutOfMemoryError|CUDA out of memory|"
    r"Cannot allocate memory|can't allocate memory|DefaultCPUAllocator|MemoryError|"
    r"No space left on device).*)$",
    re.MULTILINE,
)

Outcome = list[Check] | str
"""Of a stage: its checks, or why it is skipped."""


def run_stages(
    options: Options, make_models: Callable[[], Models], doing: Callable[[str], None]
) -> Iterator[Stage]:
    """Run the stages; each is handed out when it has ended. After one that fails, none is run.

    Args:
        options: `model` is a folder.
        make_models: makes those of the self-test. Only a stage that needs them calls it: what
            crashes at the import of torch is then told by the first stage.
        doing: called with what is being done, as "stage: what".
    """
    run = _Stages(options, make_models, doing)
    stages: list[Callable[[], Outcome]] = [run.environment, run.model, run.memory]
    stages += [partial(run.engines, name) for name in (*GRAPHS, AS_USED)]
    failed = None
    for name, stage in zip(STAGES, stages, strict=True):
        if failed is not None:
            yield Stage(name, "skipped", why=f"'{failed}' failed")
            continue
        if options.stage and name not in ("environment", *options.stage):
            yield Stage(name, "skipped", why="not named by --stage")
            continue
        began, run.stage, run.log = time.monotonic(), name, ""
        doing(name)
        if isinstance(outcome := stage(), str):
            yield Stage(name, "skipped", why=outcome)
            continue
        done = Stage.of(name, outcome, round(time.monotonic() - began, 2), run.log)
        failed = name if done.status == "failed" else None
        yield done


@dataclass
class _Stages:
    """What one stage leaves for the next."""

    options: Options
    make_models: Callable[[], Models]
    doing: Callable[[str], None]
    facts: EnvironmentFacts = field(init=False)
    stage: str = ""
    log: str = ""

    def environment(self) -> Outcome:
        """The machine, and what vLLM and PAT make of the options."""
        options = self.options
        model = options.model or self._random_models.first
        engine = engine_as_given(str(model), options)
        checks, answer = self._child("environment", json.dumps(engine), options.ranks)
        if answer is None:
            return checks
        self.facts = FACTS.validate_python(answer)
        of_machine = environment_checks(self.facts, options.ranks, options.gpu is None)
        if options.model is None and self.facts.refused is not None:
            of_machine.append(Check("options", problem=self.facts.refused))
        return [*of_machine, *checks]

    def model(self) -> Outcome:
        """What is refused."""
        if self.options.model is None:
            return "no --model is given"
        refused = self.facts.refused
        return [Check("options", "" if refused else "PAT runs it", refused)]

    def memory(self) -> Outcome:
        """Computed for the GPU that is named, or the smallest that is here."""
        options, config = self.options, self.facts.config
        if options.model is None:
            return "no --model is given"
        if options.gpu is not None:
            gpu: Device = GPUS[gpu_named(options.gpu)].device
        elif self.facts.devices:
            gpu = min(self.facts.devices, key=lambda device: device.memory)
        else:
            return "no GPU is here; --gpu names one to compute for"
        of_model = None if self.facts.on_cpu else config.get("dtype")
        dtype = of_model or "bfloat16"
        pat = PATConfig.parse(options.pat)
        shape, choice = engine_shape(config, pat, options.ranks, options.engine, gpu, dtype)
        checks = [check_memory(config, gpu, shape, dtype, choice.found)]
        if choice.warning is not None:
            checks.insert(0, Check("layouts", f"warning: {choice.warning}"))
        return checks

    def engines(self, name: str) -> Outcome:
        """Stock vLLM, and PAT beside it: every layout and every switch."""
        if self.options.gpu is not None:
            return "--gpu computes for another machine; leave it out to test this one"
        if name != "eager" and not (self.options.all or self.options.stage):
            return "only with --all"
        if self.facts.graphs.get(name) == "NONE":
            asked = f"cudagraph_mode {name.upper()}"
            return f"not on this platform: of {asked}, vLLM makes NONE on {self.facts.platform}"
        if name == AS_USED:
            stock, pat = as_used(self.options, self._random_models, self.facts)
        else:
            stock, pat = self_test(self.options, self._random_models, self.facts, GRAPHS[name])
        stock_checks, answer = self._child(
            "engine", TASK.dump_json(stock).decode(), stock.rounding_tp
        )
        if answer is None:
            return stock_checks
        task = replace(pat, references=REFERENCES.validate_python(answer))
        checks, _ = self._child("engine", TASK.dump_json(task).decode(), self.options.ranks)
        return [*stock_checks, *checks]

    @cached_property
    def _random_models(self) -> Models:
        self.doing(f"{self.stage}: making random models")
        return self.make_models()

    def _child(self, module: str, request: str, ranks: int) -> tuple[list[Check], Any]:
        """Run a module of this package in a process of its own; its checks and its answer."""
        checks: list[Check] = []
        last = "start"

        def told(event: dict[str, Any]) -> None:
            nonlocal last
            if "doing" in event:
                last = event["doing"]
                self.doing(f"{self.stage}: {last}")
            if "check" in event:
                checks.append(Check(**event["check"]))

        variables = {
            "HF_HUB_OFFLINE": "1",
            **environment(ranks),
            # An engine's core has a process of its own, as for users.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        # Only on a GPU: on CPU it takes a C++ compiler minutes.
        compiles = self.stage in ("piecewise", "full", AS_USED) and not self.facts.on_cpu
        if compiles and "TORCHDYNAMO_DISABLE" not in os.environ:
            del variables["TORCHDYNAMO_DISABLE"]
        ended = run_module(f"pat_vllm.doctor.{module}", request, variables, told, SILENCE)
        self.log = ended.log
        problem = checks[-1].problem if checks else None
        # What has answered may end as it likes: stock vLLM's process has been seen to abort.
        if problem is None and ended.code != 0 and ended.answer is None:
            problem = f"the process ended with exit code {ended.code}"
            if ended.code is None:
                problem = f"it hangs: nothing for {SILENCE:.0f} s"
            checks.append(Check(last, problem=problem))
        if problem is not None and (cause := explain(ended.log)) is not None:
            why = f"{cause} ({problem.splitlines()[0][:160]})"
            checks[-1] = replace(checks[-1], problem=why)
        return checks, ended.answer


def explain(log: str) -> str | None:
    """What ended an engine, by what it wrote; None if the log does not say.

    Too little memory comes first: a rank that found none may die of it.
    """
    if match := _MEMORY.search(log):
        return f"too little memory: {match[1].strip()}"
    if match := _DIED.search(log):
        code = f", exit code {match[2]}" if match[2] else ""
        return f"rank {match[1]} died{code}"
    return None
