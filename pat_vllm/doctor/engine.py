"""The user's engine with PAT, whose every answer is compared with stock vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.doctor.child import Events
from pat_vllm.doctor.compare import Comparison, Output, Reference
from pat_vllm.doctor.report import NamedCheck, Unfit
from pat_vllm.doctor.request import Engine, Prompts
from pat_vllm.doctor.serving import generate, score, start, switch_to
from pat_vllm.layout import Layout
from pat_vllm.predictor.draft_schedule import draft_lengths

if TYPE_CHECKING:
    from vllm import LLM

SWITCH_AFTER = 4
"""Answers of the engine after which a switch is asked for; half as many at each further try."""
_TRIES = 6
"""Attempts to switch, or to draft, before the last response has ended."""


class PATEngine:
    """An engine with PAT and its checks; each raises, or returns what the report says of it."""

    llm: LLM
    layouts: Sequence[Layout]

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        references: Sequence[Reference],
        new_weights: Path,
        events: Events,
    ) -> None:
        """`references` are of the engine's weights, and of the new ones if it can load these."""
        self.engine, self.prompts, self.events = engine, prompts, events
        self.first, *self.others = references
        self.new_weights = new_weights

    def checks(self) -> Iterator[NamedCheck]:
        """In the order in which they are made. The layouts are known when it has started."""
        yield "start", self.start
        if self.engine["additional_config"]["pat"]["policy"]["kind"] != "static":
            yield "layouts as the policy chooses", self.by_policy
        for layout in self.layouts:
            yield f"layout {layout}", partial(self.in_layout, layout, self.first)
        for source, target in permutations(self.layouts, 2):
            yield (
                f"{source} -> {target} with requests in flight",
                partial(self.across, source, target),
            )
        if "speculative_config" in self.engine:
            yield "draft length changes with requests in flight", self.with_drafts
        if sleeps := self.on_cpu or self.engine.get("enable_sleep_mode", False):
            yield "sleep and wake-up", self.sleep
        for other in self.others:
            yield "weight update", partial(self.update, other, lost=sleeps)
        yield "shutdown", self.shutdown

    def start(self) -> str:
        """Start it; fail where vLLM's own CUDA graphs are expected and a rank has captured none."""
        from pat_vllm.api import report

        self.llm = start(self.engine)
        self.layouts = report(self.llm).layouts
        found = f"layouts {', '.join(map(str, self.layouts))}"
        counts, modes, backends = zip(*self.llm.collective_rpc(facts_of), strict=True)
        runner = "V2" if self.llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
        found += f"; attention {backends[0]}, model runner {runner}"
        found += f"; cudagraph_mode {modes[0]}, {min(counts)} graphs a rank"
        named = {"compilation_config", "enforce_eager"} & self.engine.keys()
        if not (min(counts) or named or self.on_cpu):
            raise Unfit(f"no CUDA graphs were captured: {found}")
        return found

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
            if "speculative_config" in self.engine:
                # With many right drafts a response ends in a few steps.
                speculate(self.llm, int(attempt == 0))
            began = time.monotonic()
            after = SWITCH_AFTER >> attempt  # at last 0: once all is sent
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
            raise Unfit(f"all responses had ended before the engine switched to {target}")
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
            # Since the engine's start: a sample of drafts covers a second, and may begin earlier.
            drafts = report(self.llm).drafts
            return sum(d.counts.accepted for d in drafts), sum(d.counts.drafted for d in drafts)

        used: list[int] = []

        def ask(k: int) -> None:
            speculate(self.llm, k)
            used.append(k)

        longest = self.engine["speculative_config"]["num_speculative_tokens"]
        lengths = (longest, *draft_lengths(longest, None))
        after = {n: partial(ask, k) for n, k in enumerate(lengths, start=1)}
        for _ in range(_TRIES):
            switch_to(self.llm, self.layouts[-1])
            before, used[:] = counts(), []
            comparison = self.first.compare_outputs(self.generate(after))
            accepted, drafted = (now - then for now, then in zip(counts(), before, strict=True))
            if drafted:
                break
        else:
            raise Unfit("all responses had ended before the engine drafted")
        return f"k = {', '.join(map(str, used))}: {accepted} of {drafted} accepted; {comparison}"

    # ---------------------------------------------------------------- sleep and weights

    def sleep(self) -> str:
        """Sleep at level 1, which keeps the weights, and compare the answers after it."""
        self.llm.sleep(level=1)
        self.llm.wake_up()
        comparison = self.in_layout(self.layouts[-1], self.first)
        return f"without effect on CPU; {comparison}" if self.on_cpu else str(comparison)

    def update(self, expected: Reference, lost: bool) -> str:
        """Load the new weights over the first.

        Args:
            expected: what stock vLLM answers with the new weights.
            lost: the engine first sleeps at level 2, which gives up the weights.
        """
        switch_to(self.llm, self.layouts[-1])
        if lost:
            self.llm.sleep(level=2)
            self.llm.wake_up(["weights"])
        weights = {"weights_path": str(self.new_weights)}
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        if lost:
            self.llm.wake_up(["kv_cache"])
        self.llm.reset_prefix_cache()
        comparisons = (self.in_layout(layout, expected) for layout in self.layouts)
        return f"{'after sleep at level 2; ' * lost}{sum(comparisons, Comparison())}"

    # ---------------------------------------------------------------- requests

    def generate(self, after: Mapping[int, Callable[[], Any]] | None = None) -> tuple[Output, ...]:
        return generate(self.llm, self.prompts, after, beat=self.events.tell)

    def scores(self, expected: Reference) -> Comparison:
        return expected.compare_forced(score(self.llm, self.prompts, expected.outputs))


def facts_of(worker: Any) -> tuple[int, str, str]:
    """In a worker: how many CUDA graphs it has captured, its `cudagraph_mode`, and the backends of
    its attention layers."""
    from vllm.compilation.counter import compilation_counter
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    config = worker.model_runner.vllm_config.compilation_config
    layers = config.static_forward_context.values()
    backends = {
        layer.get_attn_backend().get_name()
        for layer in layers
        if isinstance(layer, AttentionLayerBase)
    }
    mode = getattr(config.cudagraph_mode, "name", str(config.cudagraph_mode))
    return compilation_counter.num_cudagraph_captured, mode, ", ".join(sorted(backends))
