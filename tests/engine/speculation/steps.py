"""What speculation has to do in each step of an engine whose core is in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pat_vllm
from pat_vllm.scheduler.draft_rows import DraftRows
from pat_vllm.scheduler.replica import Replica
from tests.engine.speculation.in_workers import generated
from tests.support.engines import scheduler_of
from tests.support.suffix import suffix_draft
from tests.vllm.scheduler.protocol import SHORTEST


def name_of(request: Any) -> str:
    """What a test calls a request; vLLM adds something random."""
    name: str = request.request_id.rpartition("-")[0]
    return name


def requests_of(llm: Any) -> list[Any]:
    """The unfinished requests."""
    replicas = scheduler_of(llm).replica_set.replicas
    return [request for replica in replicas for request in replica.scheduler.requests.values()]


def held_drafts(llm: Any) -> dict[str, list[int]]:
    """Drafts of the requests that have some for their next step."""
    return {
        name_of(request): list(request.spec_token_ids)
        for request in requests_of(llm)
        if request.spec_token_ids
    }


def drafts_in_flight(llm: Any) -> dict[str, list[int]]:
    """Drafts of steps that have been started, and whose results nobody has looked at."""
    return {
        name.rpartition("-")[0]: list(tokens)
        for replica in scheduler_of(llm).replica_set.replicas
        for step in replica.in_flight
        for name, tokens in step.scheduled_spec_decode_tokens.items()
    }


def counted(llm: Any) -> tuple[int, int]:
    """Tokens drafted and accepted so far, by the report."""
    samples = pat_vllm.report(llm).drafts
    return sum(sample.counts.drafted for sample in samples), sum(
        sample.counts.accepted for sample in samples
    )


@contextmanager
def acceptance(llm: Any, low: float = 0.3, rejected: int = 5) -> Iterator[None]:
    """Inside, a share of the drafts is accepted, and some are not; else nothing was tested.

    So no request finds what the same request said in the test before.
    """
    scheduler_of(llm).monitor.draft_rows._corpus.forget_to(0)
    before = counted(llm)
    yield
    drafted, accepted = (now - then for now, then in zip(counted(llm), before, strict=True))
    assert drafted > 50, drafted
    assert accepted >= low * drafted, (drafted, accepted)
    assert drafted - accepted >= rejected, (drafted, accepted)


def start_step(llm: Any) -> None:
    """Start a step in each replica, and leave it in flight."""
    core = llm.llm_engine.engine_core.engine_core
    step = core.scheduler.schedule()
    core.model_executor.execute_model(step, non_block=True)
    core.model_executor.sample_tokens(None, non_block=True)


def switch(llm: Any, tp: int) -> dict[str, list[int]]:
    """Switch, and check that drafts in flight are dropped, and no accepted token.

    Returns:
        The drafts that were dropped.
    """
    known: dict[str, list[int]] = {}
    for of_worker in llm.collective_rpc(generated):
        known |= of_worker
    dropped = held_drafts(llm)
    layout = pat_vllm.report(llm).layout
    assert pat_vllm.switch(llm, tp=tp)
    if tp == layout.tp:
        return {}
    assert not held_drafts(llm), "drafts of the layout before"
    for request in requests_of(llm):
        if request.num_output_tokens:
            output, expected = list(request.output_token_ids), known[request.request_id]
            assert output == expected, f"{request.request_id}: accepted tokens are lost"
    return dropped


class Watch:
    """Looks at each step of every replica.

    Attributes:
        k: the draft length that steps have to be scheduled with; None: any.
        wrong: what was not as it has to be.
        drafts: requests that got drafts.
        lengths: steps with tokens by their draft length.
        silent: steps without tokens that workers were told of.
        rows: earlier responses that the drafters were told of, by request.
    """

    def __init__(self) -> None:
        self.k: int | None = None
        self.wrong: list[str] = []
        self.drafts = 0
        self.lengths: Counter[int] = Counter()
        self.silent = 0
        self.rows: dict[str, list[list[int]]] = {}

    def scheduled(self, replica: Replica, step: Any) -> None:
        """A step was scheduled."""
        if not step.total_num_scheduled_tokens:
            self.silent += bool(step.finished_req_ids)
            return
        length = step.num_spec_tokens_to_schedule
        self.lengths[length] += 1
        if self.k is not None and length != self.k:
            self.wrong.append(f"replica {replica.index} drafts {length} tokens, not {self.k}")

    def finished(
        self, replica: Replica, step: Any, output: Any, held: dict[str, list[int]]
    ) -> None:
        """A step has finished, before which the requests held these drafts."""
        for name, request in replica.scheduler.requests.items():
            drafts = list(request.spec_token_ids)
            expected = held.get(name, [])
            if name in step.num_scheduled_tokens:
                index = output.req_id_to_index.get(name)
                drew = index is not None and output.sampled_token_ids[index]
                expected = self._due(replica, request, step) if drew else []
            if request.structured_output_request is not None:
                expected = expected[: len(drafts)]  # the grammar has cut them
            if request.sampling_params.thinking_token_budget is not None:
                expected = []
            self.drafts += bool(drafts)
            if drafts != expected:
                self.wrong.append(f"{name} has the drafts {drafts}, not {expected}")

    def _due(self, replica: Replica, request: Any, step: Any) -> list[int]:
        """The drafts that a request has to have after a step that gave it tokens."""
        tokens = list(request.all_token_ids)
        room = replica.scheduler.max_model_len - len(tokens)
        k = min(step.num_spec_tokens_to_schedule, room)
        if (left := request.sampling_params.min_tokens - request.num_output_tokens) > 0:
            k = min(k, left - 1)
        drafts, match = suffix_draft(tokens, self.rows.get(request.request_id, []), SHORTEST, k)
        return drafts[:match]  # no more than the match has


@contextmanager
def watched(k: int | None = None) -> Iterator[Watch]:
    """Inside, the steps of engines in this process are looked at; at the end nothing was wrong."""
    watch = Watch()
    watch.k = k
    schedule, finish, update = Replica.schedule, Replica.finish, DraftRows.update

    def scheduling(replica: Replica, *args: Any) -> Any:
        step = schedule(replica, *args)
        watch.scheduled(replica, step)
        return step

    def finishing(replica: Replica, output: Any, *args: Any) -> Any:
        step = replica.in_flight[0]
        held = {
            name: list(request.spec_token_ids)
            for name, request in replica.scheduler.requests.items()
        }
        outputs = finish(replica, output, *args)
        watch.finished(replica, step, output, held)
        return outputs

    def updating(rows: DraftRows, *args: Any) -> Any:
        row_update = update(rows, *args)
        for request_id in row_update.of_requests if row_update else ():
            watch.rows[request_id] = [row.tokens[1:].tolist() for row in rows._rows[request_id]]
        return row_update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftRows, "update", updating)
        patch.setattr(Replica, "schedule", scheduling)
        patch.setattr(Replica, "finish", finishing)
        yield watch
    assert not watch.wrong, watch.wrong[:5]
