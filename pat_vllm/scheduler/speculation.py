"""How many draft tokens the replicas' steps verify: as configured, by the policy, or on request."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

    from pat_vllm.layout import Layout
    from pat_vllm.predictor.draft_schedule import Schedule
    from pat_vllm.scheduler.replica import Replica


def lengths_to_plan(config: SpeculativeConfig | None, kept: Sequence[int]) -> Sequence[int]:
    """The draft lengths among which the policy may choose.

    Only 0 where a user's table holds: the configuration says then.

    Args:
        kept: those that the engine keeps ready.
    """
    if config is None or config.num_speculative_tokens_per_batch_size is not None:
        return (0,)
    return kept


class DraftLengths:
    """Writes the draft lengths into the table that each replica's scheduler reads at each step.

    So a change is a new table: no step waits, and drafts that were made before are still verified.
    """

    def __init__(
        self,
        config: SpeculativeConfig | None,
        allowed: Sequence[int],
        of_policy: Callable[[], Mapping[Layout, Schedule]],
    ) -> None:
        """Keep to the `allowed` lengths, which the engine has ready.

        `of_policy` gives `Policy.drafts`; other layouts are as `config` says.
        """
        self.allowed = tuple(allowed)
        self._config = config
        self._of_policy = of_policy
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._requested: int | None = None
        self._written: tuple[object, ...] = ()

    def request(self, length: int | None) -> None:
        """Use this draft length from the next step on; None: what holds without a request.

        May be called from every thread.

        Raises:
            ValueError: the engine does not keep that length ready.
        """
        if length is not None and (type(length) is not int or length not in self.allowed):
            ready = f"keeps {list(self.allowed)} ready" if self.allowed else "does not speculate"
            raise ValueError(
                f"cannot use {length!r} draft tokens: the engine {ready}; see vLLM's "
                "speculative_config"
            )
        self._asked.put(length)

    def release(self) -> None:
        """The work is over, and with it what was requested for its steps.

        What no step has used yet was requested for the next work.
        """
        self._requested = None

    def write(self, layout: Layout, replicas: Sequence[Replica]) -> None:
        """Have the steps of these replicas use what holds now. To be called before each step."""
        while not self._asked.empty():
            self._requested = self._asked.get()
        requested, of_policy = self._requested, self._of_policy()
        # A switch in place keeps the replicas.
        now = layout, requested, of_policy, replicas
        if self._config is None or self._written == now:
            return
        self._written = now
        for replica in replicas:
            scheduler = replica.scheduler
            most = scheduler.scheduler_config.max_num_seqs
            scheduler.dynamic_sd_lookup = self._table(of_policy.get(layout), requested, most)

    def _table(self, planned: Schedule | None, requested: int | None, most: int) -> list[int]:
        """Draft length by the number of requests in a step."""
        assert self._config is not None
        longest = self._config.num_speculative_tokens
        if requested is not None:
            return [requested] * (most + 1)
        schedule = planned or self._config.num_speculative_tokens_per_batch_size
        if schedule is None:
            return [longest] * (most + 1)
        table: list[int] = build_dynamic_sd_schedule_lookup([*schedule], most, longest)
        return table
