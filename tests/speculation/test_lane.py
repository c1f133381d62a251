"""Drafts travel with the reply of the step that made them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from pat_vllm.executor.lanes import EXECUTE, LEAVE, SAMPLE, WorkerLanes
from pat_vllm.layout import Layout
from pat_vllm.worker.worker import PATWorkerMixin
from tests.support.mutation import mutated

ONE = Layout(1, 2)
SAMPLED = ModelRunnerOutput(["a"], {"a": 0}, [[5]])
DRAFTS = DraftTokenIds(["a"], [[6, 7]])


class Worker:
    """Keeps its drafts until the next sampled step, as vLLM's runner does."""

    def __init__(self, speculates: bool = True, asynchronous: bool = False) -> None:
        self.vllm_config = SimpleNamespace(
            speculative_config="some" if speculates else None,
            scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        )
        self.drafts: DraftTokenIds | None = None

    def execute_model(self, tokens: int) -> Any:
        return None if tokens else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammars: Any) -> Any:
        self.drafts = DRAFTS
        return SAMPLED

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.drafts

    def drafts_of_step(self, constrained: bool) -> DraftTokenIds | None:
        worker: Any = self
        return PATWorkerMixin.drafts_of_step(worker, constrained)


def replies(worker: Any, messages: list[tuple[str, Any]], rank: int = 0) -> list[Any]:
    """What a rank of tp1dp2 replies."""
    lane = iter([*messages, (LEAVE, None)])
    found: list[Any] = []
    ends: Any = WorkerLanes.__new__(WorkerLanes)
    ends._rings = {ONE.tp: SimpleNamespace(dequeue=lambda **options: next(lane))}
    ends._rank, ends._device, ends._finishing = rank, torch.device("cpu"), None
    ends._reply = SimpleNamespace(enqueue=found.append)
    ends.serve(ONE, worker)
    assert all(succeeded for succeeded, _ in found)
    return [reply for _, reply in found]


def check_lane() -> None:
    """Steps with tokens, and one between them of which a worker only hears what has ended."""
    step = [(EXECUTE, 3), (SAMPLE, None)]
    first, silent, second = replies(Worker(), [*step, (EXECUTE, 0), *step])
    assert (first.output, first.drafts) == (SAMPLED, DRAFTS)
    assert (silent.output, silent.drafts) == (EMPTY_MODEL_RUNNER_OUTPUT, None)
    assert (second.output, second.drafts) == (SAMPLED, DRAFTS)


def test_drafts_travel_with_their_step() -> None:
    check_lane()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "output = worker.execute_model(payload)": "output = worker.execute_model(payload); "
                "drafts = worker.drafts_of_step(constrained=False)"
            },
            id="a step without tokens sends the drafts of the step before",
        ),
        pytest.param({"self._answer(output, drafts)": "self._answer(output, None)"}, id="lost"),
    ],
)
def test_wrong_drafts_are_seen(changes: dict[str, str]) -> None:
    with mutated(WorkerLanes.serve, changes), pytest.raises(AssertionError):
        check_lane()


def test_only_grammars_need_the_drafts_of_asynchronous_steps() -> None:
    for grammars, drafts in ((None, None), ("some", DRAFTS)):
        (reply,) = replies(Worker(asynchronous=True), [(EXECUTE, 3), (SAMPLE, grammars)])
        assert reply.drafts == drafts


def test_an_engine_that_does_not_speculate_has_no_drafts() -> None:
    (reply,) = replies(Worker(speculates=False), [(EXECUTE, 3), (SAMPLE, None)])
    assert reply.drafts is None
