"""A worker with CUDA graphs through switches and weight updates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pat_vllm.layout import Experts
from tests.gpuless.cuda_graphs import Driver, Graph
from tests.support.kinds import full
from tests.support.models import phrase

PATHS = {2: (1, 2), 4: (1, 2, 4, 2)}
"""By number of ranks, the layouts that are visited before the first update."""
DECODE_STEPS = 2
"""After each prefill."""
DRAFTS = 3
"""The most that a worker verifies which speculates; PAT keeps each length up to them ready."""
PROMPTS = ((11, 12, 13), (21, 22), (31, 32))
REPEATED = tuple(phrase("repeating", 18, start) for start in range(3))
"""Prompts after which drafts are accepted."""


@dataclass
class Run:
    """A worker, and what has become of it.

    Attributes:
        hidden: of each step, the phase and the hidden states that tokens are sampled from.
        active: tp of the layout in which each phase generates.
    """

    worker: Any
    driver: Driver
    experts: Experts | None = None
    hidden: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    active: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, ranks: int, rank: int, **options: Any) -> Run:
        """See `GraphWorker.start`."""
        from tests.gpuless.graph_worker import GraphWorker

        driver = Driver()
        worker = GraphWorker.start(ranks, rank, driver, **options)
        run = cls(worker, driver, options.get("experts"))
        for runtime in run.worker.runtimes.values():
            model = runtime.runner.get_model()
            model.compute_logits = functools.partial(run._sample, model.compute_logits)
        return run

    def _sample(self, compute_logits: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        self.hidden.append((self.driver.phase, hidden_states.clone()))
        logits: torch.Tensor = compute_logits(hidden_states)
        return logits

    @property
    def graphs(self) -> dict[int, tuple[int, str, int]]:
        """Layout's tp, kind and number of tokens of each graph that a layout has, by number."""
        by_number = {}
        for tp, runtime in self.worker.runtimes.items():
            for description, graph in full_graphs(runtime.runner).items():
                by_number[graph.number] = (tp, "FULL", description.num_tokens)
            for description, entry in piecewise_graphs(runtime.runner).entries.items():
                for part in entry.capture.segments:
                    owner = getattr(part, "__self__", None)
                    if isinstance(owner, Graph):
                        by_number[owner.number] = (tp, "PIECEWISE", description.num_tokens)
        return by_number

    def generate(
        self,
        phase: str,
        tp: int,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        drafts: int = 0,
    ) -> None:
        """Prefill and decode in the layout of this tp, which is active.

        Args:
            drafts: draft tokens of each request that one more step verifies.
        """
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import SchedulerOutput

        from pat_vllm.worker.synthetic import add_new, decode_step, finish, make_requests

        self.driver.phase = phase
        self.active[phase] = tp
        steps = DECODE_STEPS + bool(drafts)
        room = steps + drafts + 1
        lengths = [len(prompt) for prompt in prompts]
        requests = make_requests(phase, lengths, room, full(1, 32), decoding=False)
        use_v2 = self.worker.use_v2_model_runner
        first = add_new(SchedulerOutput.make_empty(), requests, use_v2, room)
        for new, prompt in zip(first.scheduled_new_reqs, prompts, strict=True):
            new.prompt_token_ids = list(prompt)
            new.prefill_token_ids = new.prompt_token_ids if use_v2 else None
            new.sampling_params = SamplingParams(temperature=0.0, max_tokens=room)
        self._step(first)
        for done in range(1, steps + 1):
            verified = drafts if done > DECODE_STEPS else 0
            step = decode_step(requests, [done] * len(requests), verified)
            step.num_spec_tokens_to_schedule = drafts
            self._step(step)
        self.worker.execute_model(finish(requests))

    def _step(self, step: Any) -> None:
        output = self.worker.execute_model(step)
        if output is None:
            output = self.worker.sample_tokens(None)
        if hasattr(output, "get_output"):
            output.get_output()

    def update(self, method: str, *args: Any) -> None:
        """Have the worker's method write new weights, as PAT's executor does."""
        failed = self.worker.pat_call_in_base(method, args, {})
        assert failed is None, failed
        self.worker.pat_refresh_weights()

    def verify(self) -> Run:
        """Verify drafts of each length, in each layout."""
        for number, tp in enumerate(self.worker.runtimes):
            if number:
                self.worker.switch(number, tp)
            for drafts in range(DRAFTS + 1):
                self.generate(f"tp={tp}, {drafts} drafts", tp, REPEATED, drafts)
        return self

    def drive(self) -> Run:
        """Switch, generate, and update weights."""
        worker = self.worker
        path = PATHS[worker._base.layout.world_size]
        for number, tp in enumerate(path):
            if number:
                worker.switch(number, tp)
            self.generate(f"layout {number}", tp)
        model = "qwen3" if self.experts is None else "qwen3_moe"
        self.update("load", f"{model}_updated")
        self.generate("updated", tp)
        self.update("replace_parameters")
        self.generate("updated elsewhere", tp)
        worker.switch(len(path), 1)
        self.generate("back", 1)
        self.update("load", model)
        self.generate("as at first", 1)
        return self


def full_graphs(runner: Any) -> dict[Any, Graph]:
    """A model runner's graphs of whole steps."""
    if hasattr(runner, "req_states"):
        graphs: dict[Any, Graph] = runner.cudagraph_manager.graphs
        return graphs
    entries = runner.model.concrete_cudagraph_entries
    return {key: entry.cudagraph for key, entry in entries.items()}


def piecewise_graphs(runner: Any) -> Any:
    """vLLM's keeper of a model runner's graphs of what is between attention layers."""
    if hasattr(runner, "req_states"):
        return runner.cudagraph_manager.breakable_cg_runner
    return runner.model.runnable
