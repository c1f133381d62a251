"""What goes wrong while drafts are in flight stays bounded: they are verified, or dropped whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pat_vllm
from pat_vllm.scheduler import switch as switch_module
from tests.engines import Job, Outcome, engine, run, scheduler_of
from tests.speculation.sabotage import die_in_verification, fail_in_drafter
from tests.support.mutation import mutated
from tests.test_faults import assert_a_dead_worker_is_noticed

pytestmark = pytest.mark.slow

SPECULATIVE: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}

Drafts = dict[str, list[int]]
"""Draft tokens by request, as the engine core names it."""


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with (
        pytest.MonkeyPatch.context() as patch,
        engine("repeating", 2, {"kv_transfer": "migrate"}, speculative_config=SPECULATIVE) as llm,
    ):
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        # An engine step is a step of each replica, whichever is the faster.
        executor = core_of(llm).model_executor
        patch.setattr(executor, "finished", functools.partial(executor.finished, wait_for_all=True))
        yield llm


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def jobs() -> dict[str, Job]:
    """Requests whose text repeats what the prompt says twice."""
    phrase = list(range(3, 19))
    return {
        f"r{i}": Job(
            [*phrase[i:], *phrase, *phrase[: 4 + i]],
            {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
        )
        for i in range(6)
    }


@pytest.fixture(scope="module")
def expected(llm: Any) -> dict[str, Outcome]:
    """What comes of the requests undisturbed."""
    began = drafted(llm)
    outcomes = run(llm, jobs())
    (verified, accepted), (before, _) = drafted(llm), began
    assert verified - before > 100
    assert 0.3 < accepted / verified < 0.9
    return outcomes


def drafted(llm: Any) -> tuple[int, int]:
    """Draft tokens verified and accepted so far."""
    samples = pat_vllm.report(llm).drafts
    return sum(one.drafted for one in samples), sum(one.accepted for one in samples)


def held(llm: Any) -> Drafts:
    """The drafts that the next step is to verify."""
    return {
        name: list(request.spec_token_ids)
        for replica in scheduler_of(llm).replica_set.replicas
        for name, request in replica.scheduler.requests.items()
        if request.spec_token_ids
    }


def in_flight(llm: Any) -> Drafts:
    """The drafts of steps that have been started, and whose results nobody has looked at."""
    return {
        name: list(tokens)
        for replica in scheduler_of(llm).replica_set.replicas
        for step in replica.in_flight
        for name, tokens in step.scheduled_spec_decode_tokens.items()
    }


@pytest.mark.parametrize("when", ["before they are verified", "while they are verified"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_abort_between_draft_and_verification(
    llm: Any, expected: dict[str, Outcome], when: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests; the others go on, and the blocks of the two come back."""
    aborted: list[str] = []

    def abort(drafts: Drafts) -> None:
        if not aborted and len(drafts) >= 2:
            aborted.extend([min(drafts), max(drafts)])
            llm.llm_engine.abort_request(aborted, internal=True)
            requests = scheduler_of(llm).monitor.requests
            assert all(requests.replica_of(name) is None for name in aborted)

    if when == "while they are verified":
        monkeypatch.setattr(core_of(llm), "_process_aborts_queue", lambda: abort(in_flight(llm)))

    def before_step(step: int) -> None:
        if step == 0:
            assert pat_vllm.switch(llm, tp=tp)
        if when == "before they are verified":
            abort(held(llm))

    outcomes = run(llm, jobs(), before_step=before_step)
    assert scheduler_of(llm).get_request_counts() == (0, 0)
    assert scheduler_of(llm).get_kv_cache_usage() == 0
    gone = {name.rpartition("-")[0] for name in aborted}
    assert len(gone) == 2
    assert {name: one.token_ids for name, one in outcomes.items()} == {
        name: one.token_ids for name, one in expected.items() if name not in gone
    }


def refused(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch that is refused for a reason that is known beforehand."""
    (request, *_) = scheduler_of(llm).replica_set.replicas[0].scheduler.running
    request.resumable = True
    assert pat_vllm.switch(llm, tp=2) is False
    request.resumable = False


def undone(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch whose planning fails at its end."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no plan today")

    llm.provoked = "no plan today"
    with monkeypatch.context() as patch:
        patch.setattr(switch_module, "plan_moves", fail)
        with pytest.raises(switch_module.PlanningFailed, match="no plan today"):
            pat_vllm.switch(llm, tp=2)


def check_drafts_outlive(
    attempt: Callable[[Any, pytest.MonkeyPatch], None],
    llm: Any,
    expected: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts that were in flight at a switch that was not made are verified in the next step."""
    wanted: Drafts = {}
    verified: list[bool] = []

    def look() -> None:
        if wanted:
            verified.append(in_flight(llm) == wanted)
            wanted.clear()

    monkeypatch.setattr(core_of(llm), "_process_aborts_queue", look)

    def before_step(step: int) -> None:
        if (drafts := held(llm)) and step in (4, 5, 9):
            attempt(llm, monkeypatch)
            wanted.update(drafts)

    outcomes = run(llm, jobs(), before_step=before_step)
    assert verified == [True, True, True]
    assert {name: one.token_ids for name, one in outcomes.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


@pytest.mark.parametrize("attempt", [refused, undone])
def test_a_switch_that_is_not_made_drops_no_drafts(
    llm: Any,
    expected: dict[str, Outcome],
    attempt: Callable[[Any, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_drafts_outlive(attempt, llm, expected, monkeypatch)


def test_drafts_that_a_failed_plan_forgets_are_seen(
    llm: Any, expected: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = {"self.request.spec_token_ids = self.spec_token_ids": "pass"}
    with mutated(switch_module._Undo.apply, forgotten), pytest.raises(AssertionError):
        check_drafts_outlive(undone, llm, expected, monkeypatch)


def test_a_drafter_that_fails_is_named(llm: Any) -> None:
    """The last test of this engine: vLLM has no other drafter to go on with."""
    llm.collective_rpc(fail_in_drafter)
    with pytest.raises(RuntimeError, match="no n-gram today"):
        run(llm, jobs())


@pytest.mark.parametrize(
    ("tp", "sabotage"),
    [
        (2, die_in_verification),
        pytest.param(1, die_in_verification, marks=pytest.mark.nightly),
        pytest.param(1, fail_in_drafter, marks=pytest.mark.nightly),
        pytest.param(2, fail_in_drafter, marks=pytest.mark.nightly),
    ],
)
def test_a_worker_that_fails_while_it_speculates_ends_the_engine(
    tp: int, sabotage: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine with processes of its own, as for users, of which none is left."""
    assert_a_dead_worker_is_noticed({}, sabotage, tp, monkeypatch, speculative_config=SPECULATIVE)
