"""The checks of one engine, in a process of its own: `python -m pat_vllm.doctor.engine`.

An engine of stock vLLM says what is right, and one with PAT is compared with that. The engine core
has its own process, as for users: a switch is asked for while it generates.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pat_vllm.doctor.child import Events
from pat_vllm.doctor.compare import Comparison, Differs, Output, Reference
from pat_vllm.doctor.in_workers import graphs_of, send_by_ipc
from pat_vllm.doctor.report import Check
from pat_vllm.doctor.serving import Prompts, generate, score
from pat_vllm.layout import Layout
from pat_vllm.profiling.cache import CACHE_DIR

if TYPE_CHECKING:
    from vllm import LLM

SWITCH_AFTER = 4
"""Answers of the engine after which a switch is asked for; half as many at each further try."""
_TRIES = 6
"""To switch, or to draft, before the last response has ended."""
_LIKELIEST = 5
"""Tokens whose log-probabilities stock vLLM gives at each place."""

NamedCheck = tuple[str, Callable[[], object]]
"""A check returns what it has found, which `str` says in a few words, and raises what is wrong."""


@dataclass(frozen=True)
class Task:
    """An engine, what it is asked, and what it is compared with.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        other_weights: folder of a checkpoint of the same shape, for a weight update.
        prompts: of the requests.
        references: of the first weights, then of the others; none for stock vLLM, which makes them.
        draft_lengths: to go through while it generates; the engine speculates if there are any.
        sleeps: it can be put to sleep.
        graphs: it must have captured CUDA graphs.
        as_used: what differs from the user's engine, in words; empty: this is the doctor's own.
        rounding_tp: of stock vLLM: also ask an engine of this tensor parallelism, to know what
            rounding does in 16-bit floats; 1: do not.
    """

    engine: dict[str, Any]
    other_weights: str
    prompts: Prompts
    references: tuple[Reference, ...] = ()
    draft_lengths: tuple[int, ...] = ()
    sleeps: bool = True
    graphs: bool = False
    as_used: str = ""
    rounding_tp: int = 1


TASK = TypeAdapter(Task)
REFERENCES = TypeAdapter(tuple[Reference, ...])


def run_checks(checks: Iterable[NamedCheck], events: Events) -> bool:
    """Run checks until one fails, and tell what each has found; whether none has failed."""
    for name, check in checks:
        events.tell(doing=name)
        began = time.monotonic()
        result, problem = "", None
        try:
            result = str(check())
        except Differs as error:
            problem = str(error)
        except Exception as error:  # it is told, whatever it was
            problem = f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began, 2)
        last = {} if problem is None else {"last": True}
        events.tell(check=asdict(Check(name, result, problem, seconds)), **last)
        if problem is not None:
            return False
    return True


class StockEngine:
    """Stock vLLM, with either of the weights, as the reference."""

    def __init__(self, task: Task, events: Events) -> None:
        self.task, self.events = task, events
        self.references: list[Reference] = []
        self.rounding = 0.0

    def checks(self) -> Iterator[NamedCheck]:
        """One for each of the weights, and of the first also with tensor parallelism."""
        yield "stock vLLM", partial(self._refer, self.task.engine["model"])
        if self.task.rounding_tp > 1:
            yield f"stock vLLM, tensor parallelism {self.task.rounding_tp}", self._round
        yield "stock vLLM new weights", partial(self._refer, self.task.other_weights)

    def _refer(self, model: str) -> str:
        with self._engine(model=model) as llm:
            outputs = generate(llm, self.task.prompts, likeliest=_LIKELIEST, beat=self.events.tell)
            forced = score(llm, self.task.prompts, outputs)
        reference = Reference(outputs, forced, self.rounding)
        reference.check()
        self.references.append(reference)
        return f"{len(outputs)} requests; off itself by {reference.noise:.1e}"

    def _round(self) -> str:
        """How far tensor parallelism alone moves stock vLLM's log-probabilities: 16-bit sums are
        rounded on each rank, and their sum again."""
        (first,) = self.references
        with self._engine(tensor_parallel_size=self.task.rounding_tp) as llm:
            self.rounding = first.apart(score(llm, self.task.prompts, first.outputs))
        self.references = [replace(first, rounding=self.rounding)]
        self.references[0].check()
        return f"off the engine without by {self.rounding:.1e}"

    @contextmanager
    def _engine(self, **changed: Any) -> Iterator[LLM]:
        from vllm import LLM

        llm = LLM(**{**self.task.engine, **changed})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


class PATEngine:
    """An engine with PAT, whose every answer is compared with stock vLLM's."""

    llm: LLM
    layouts: Sequence[Layout]

    def __init__(self, task: Task, events: Events) -> None:
        self.task, self.events = task, events
        self.first, self.other = task.references

    def checks(self) -> Iterator[NamedCheck]:
        """In the order in which they are made. The layouts are known when it has started."""
        task, loses_weights = self.task, self.task.sleeps and bool(self.task.as_used)
        yield "start", self.start
        if task.as_used:
            yield "layouts as the policy chooses", self.by_policy
        for layout in self.layouts:
            yield f"layout {layout}", partial(self.in_layout, layout, self.first)
        for source, target in permutations(self.layouts, 2):
            yield (
                f"{source} -> {target} with requests in flight",
                partial(self.across, source, target),
            )
        if task.draft_lengths:
            yield "draft length changes with requests in flight", self.with_drafts
        if task.sleeps and not loses_weights:
            yield "sleep and wake-up", self.sleep
        if loses_weights:
            yield "sleep at level 2, weight update", self.update_after_level_2
        else:
            yield "weight update", self.update
        if task.as_used:
            yield "weight update by IPC", self.update_by_ipc
        yield "shutdown", self.shutdown

    def start(self) -> str:
        """Start it; fail where CUDA graphs are expected and a rank has captured none."""
        from vllm import LLM

        from pat_vllm.api import report

        self.llm = LLM(**self.task.engine)
        self.layouts = report(self.llm).layouts
        parts = [f"layouts {', '.join(map(str, self.layouts))}"]
        if self.task.as_used:
            lengths = [len(prompt) for prompt in self.task.prompts]
            parts.append(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens")
            parts.append(self.task.as_used)
        if self.task.graphs:
            counts, modes = zip(*self.llm.collective_rpc(graphs_of), strict=True)
            text = f"cudagraph_mode {modes[0]}, {min(counts)} graphs a rank"
            if not min(counts):
                raise RuntimeError(f"no CUDA graphs were captured: {text}")
            parts.append(text)
        return "; ".join(parts)

    def shutdown(self) -> str:
        self.llm.llm_engine.engine_core.shutdown()
        return ""

    @property
    def on_cpu(self) -> bool:
        return bool(self.llm.llm_engine.vllm_config.device_config.device_type == "cpu")

    # ---------------------------------------------------------------- layouts

    def by_policy(self) -> str:
        """Generate in the layouts that the engine's policy chooses."""
        from pat_vllm.api import report

        began = time.monotonic()
        comparison = self.first.compare_outputs(self.generate())
        switches = report(self.llm, since=began).switches
        chosen = [str(switch.target) for switch in switches if switch.reason == "policy"]
        went = f"it went to {', '.join(chosen)}" if chosen else "it stayed in one"
        return f"{went}; {comparison}"

    def in_layout(self, layout: Layout, expected: Reference) -> Comparison:
        """Generate in a layout, and score stock vLLM's tokens in it."""
        switch_to(self.llm, layout)
        comparison = expected.compare_outputs(self.generate())
        switch_to(self.llm, layout)  # a layout that was asked for holds until the batch ends
        return comparison + self.scores(expected)

    def across(self, source: Layout, target: Layout) -> str:
        """Switch while requests are in flight; what they say is what they say in one layout."""
        from pat_vllm.api import report, speculate

        for attempt in range(_TRIES):
            switch_to(self.llm, source)
            if self.llm.llm_engine.vllm_config.num_speculative_tokens:
                # With many right drafts a response ends in a few steps.
                speculate(self.llm, int(attempt == 0))
            began = time.monotonic()
            after = SWITCH_AFTER >> attempt  # in the end before the first answer
            outputs = self.generate({after: partial(switch_to, self.llm, target)})
            comparison = self.first.compare_outputs(outputs)
            forced = [
                switch
                for switch in report(self.llm, since=began).switches
                if (switch.source, switch.target, switch.reason) == (source, target, "forced")
            ]
            if forced and (switch := forced[0]).num_seqs:
                break
        else:
            raise RuntimeError(f"all responses had ended before the engine switched to {target}")
        # The engine may be back in its usual layout. Scores look at the weights as the switch
        # leaves them.
        switch_to(self.llm, source)
        switch_to(self.llm, target)
        comparison += self.scores(self.first)
        moved = f"{switch.num_seqs} in flight, {switch.migrated} migrated"
        return f"{moved}, {1e3 * switch.seconds:.0f} ms; {comparison}"

    def with_drafts(self) -> str:
        """Go through the draft lengths while requests are in flight."""
        from pat_vllm.api import report, speculate

        def counts() -> tuple[int, int]:
            # Of all time: drafts are counted by the second.
            drafts = report(self.llm).drafts
            return sum(d.counts.accepted for d in drafts), sum(d.counts.drafted for d in drafts)

        used: list[int] = []

        def ask(k: int) -> None:
            speculate(self.llm, k)
            used.append(k)

        after = {n: partial(ask, k) for n, k in enumerate(self.task.draft_lengths, start=1)}
        for _ in range(_TRIES):
            switch_to(self.llm, self.layouts[-1])
            before, used[:] = counts(), []
            comparison = self.first.compare_outputs(self.generate(after))
            accepted, drafted = (now - then for now, then in zip(counts(), before, strict=True))
            if drafted:
                break
        else:
            raise RuntimeError("all responses had ended before the engine drafted")
        return f"k = {', '.join(map(str, used))}: {accepted} of {drafted} accepted; {comparison}"

    # ---------------------------------------------------------------- sleep and weights

    def sleep(self) -> str:
        """At level 1, which keeps the weights."""
        self.llm.sleep(level=1)
        self.llm.wake_up()
        comparison = self.in_layout(self.layouts[-1], self.first)
        return f"without effect on CPU; {comparison}" if self.on_cpu else str(comparison)

    def update(self) -> Comparison:
        """Load the other weights over the first."""
        switch_to(self.llm, self.layouts[-1])
        self._reload()
        return self._in_all_layouts(self.other)

    def update_after_level_2(self) -> str:
        """Load the other weights in place of those that sleep at level 2 has given up."""
        switch_to(self.llm, self.layouts[-1])
        self.llm.sleep(level=2)
        self.llm.wake_up(["weights"])
        self._reload()
        self.llm.wake_up(["kv_cache"])
        where = "sleep is without effect on CPU" if self.on_cpu else "in place of lost weights"
        return f"{where}; {self._in_all_layouts(self.other)}"

    def update_by_ipc(self) -> str:
        """The first weights again, from this process's memory."""
        switch_to(self.llm, self.layouts[-1])
        memory = send_by_ipc(self.llm, self.task.engine["model"], self.on_cpu)
        return f"{memory}; {self._in_all_layouts(self.first)}"

    def _reload(self) -> None:
        weights = {"weights_path": self.task.other_weights}
        self.llm.collective_rpc("reload_weights", kwargs=weights)

    def _in_all_layouts(self, expected: Reference) -> Comparison:
        self.llm.reset_prefix_cache()
        return sum((self.in_layout(at, expected) for at in self.layouts), Comparison())

    # ---------------------------------------------------------------- requests

    def generate(self, after: Mapping[int, Callable[[], Any]] | None = None) -> tuple[Output, ...]:
        return generate(self.llm, self.task.prompts, after, beat=self.events.tell)

    def scores(self, expected: Reference) -> Comparison:
        return expected.compare_forced(score(self.llm, self.task.prompts, expected.outputs))


def switch_to(llm: LLM, layout: Layout) -> None:
    """Switch, or say why not."""
    from pat_vllm.api import report, switch

    if not switch(llm, layout.tp):
        refused = report(llm).refused
        why = refused[-1].why if refused else "?"
        raise RuntimeError(f"the switch to {layout} was refused: {why}")


def main(request: str, events: str) -> None:
    """The child: a `Task` in; the answer of stock vLLM are the references."""
    task = TASK.validate_json(Path(request).read_text())
    # The profile of a random model is of no use later.
    os.environ[CACHE_DIR] = str(Path(events).parent)
    # vLLM wants it said that functions, and handles of memory, may be sent to its workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    lines = Events(events)
    if not task.references:
        stock = StockEngine(task, lines)
        if not run_checks(stock.checks(), lines):
            sys.exit(1)
        answer = REFERENCES.dump_python(tuple(stock.references), mode="json")
        lines.tell(answer=answer, last=True)
        return
    engine = PATEngine(task, lines)
    if not run_checks(engine.checks(), lines):
        # Or this process would wait for the engine's at its end.
        with suppress(Exception):
            engine.shutdown()
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
