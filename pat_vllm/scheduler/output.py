"""What the scheduler hands the executor for one engine step: a step per ready replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput


@dataclass
class PATSchedulerOutput(SchedulerOutput):
    """Steps by replica. The inherited fields only tell vLLM's engine loop that there is work."""

    steps: dict[int, SchedulerOutput] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: dict[int, SchedulerOutput], in_flight: bool) -> PATSchedulerOutput:
        """Bundle the steps.

        vLLM's engine loop takes zero scheduled tokens for "nothing to wait for", so while any
        step is in flight, an earlier one included, the total is at least one.
        """
        output = cls(**vars(SchedulerOutput.make_empty()), steps=steps)
        tokens = sum(step.total_num_scheduled_tokens for step in steps.values())
        output.total_num_scheduled_tokens = max(tokens, int(in_flight))
        return output


@dataclass
class PATGrammarOutput(GrammarOutput):
    """Grammar bitmasks by replica."""

    of_replica: dict[int, GrammarOutput] = field(default_factory=dict)
