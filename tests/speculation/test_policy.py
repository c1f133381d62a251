"""The policy that predicts chooses draft lengths, by layout and by number of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.state import LiveRequests, LiveState
from pat_vllm.profiling.profile import StepShape
from pat_vllm.scheduler.monitor import Monitor
from pat_vllm.scheduler.requests import accepted_drafts
from pat_vllm.scheduler.speculation import lengths_to_plan
from pat_vllm.simulator.modelled.hardware import named_profile
from tests.support.mutation import mutated

LENGTHS = (0, 1, 2, 4)
BOUND = 4096


def policy_of(lengths: tuple[int, ...] = LENGTHS) -> AdaptivePolicy:
    # Step times are modelled.
    profile = named_profile("llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:], drafting=0.001)
    return AdaptivePolicy(profile, bound=BOUND, draft_lengths=lengths, timer=lambda: 0.0)


class Driven:
    """A policy with some live requests that decode in the base layout."""

    def __init__(self, policy: AdaptivePolicy, requests: int = 8) -> None:
        self.policy, self.requests, self.now = policy, requests, 0.0
        self.layout: Layout = policy.home
        for request in range(requests):
            policy.arrived(0.0, request)

    def steps(self, count: int, k: int, accepted: int | None) -> None:
        """Steps of a replica with all requests; None: no draft was found for any."""
        batch = self.requests
        hits = 0 if accepted is None else batch
        shape = StepShape(batch, 500 * batch, 500, drafts=hits * k, k=k)
        for _ in range(count):
            self.now += 0.01
            self.policy.stepped(self.now, self.layout, shape, 0.01)
            self.policy.drafted(self.now, k, batch, np.full(hits, accepted or 0))

    def plan(self) -> dict[int, int]:
        """`table` after a plan."""
        self.now += 100.0
        count = np.full(self.requests, 1)
        live = LiveRequests(
            num_prompt_tokens=100 * count,
            num_output_tokens=400 * count,
            max_tokens=BOUND * count,
            exact=count < 0,
            group=count.cumsum(),
            replica=0 * count,
            num_computed_tokens=500 * count,
        )
        self.policy.choose(LiveState(self.now, self.layout, self.requests, 10.0, lambda: live))
        return self.table()

    def table(self) -> dict[int, int]:
        """The draft length of the layout by requests of a replica."""
        schedule = self.policy.drafts.get(self.layout, ())
        return {batch: k for first, last, k in schedule for batch in range(first, last + 1)}


def check_between_batches() -> None:
    """A batch begins without drafts, and not with the lengths of the last one's tail."""
    one = Driven(policy_of())
    assert {*one.table().values()} == {0}
    one.steps(70, 4, 4)
    assert one.plan()[1] == 4
    one.policy.idle(one.now)
    assert {*one.table().values()} == {0}
    assert one.plan()[1] == 4


def test_a_batch_begins_without_drafts() -> None:
    check_between_batches()


@pytest.mark.parametrize("method", [AdaptivePolicy.__init__, AdaptivePolicy.idle])
def test_lengths_for_another_batch_are_noticed(method: Any) -> None:
    changes = {"self.drafts = self._no_drafts": "pass"}
    with mutated(method, changes), pytest.raises(AssertionError):
        check_between_batches()


def check_draft_lengths() -> None:
    one = Driven(policy_of())
    one.steps(70, 4, 4)
    planned = one.plan()
    assert planned[1] == planned[2] == 4, "drafts that are all accepted"
    one.steps(3000, 4, 0)
    assert one.plan()[1] == 0, "drafts that are never accepted"
    one.policy.weights_changed()
    assert one.plan()[1] > 0, "with other weights they may be"


def test_draft_lengths_follow_what_is_accepted() -> None:
    check_draft_lengths()


def test_where_nothing_is_found_it_hardly_matters_what_is_asked_for() -> None:
    one = Driven(policy_of())
    one.steps(2000, 4, None)
    one.plan()
    drafting = one.policy._drafting
    assert drafting.tokens[-1] < 1.02 and drafting.drafts[-1] < 0.1


def test_an_engine_that_leaves_lengths_to_its_configuration() -> None:
    one = Driven(policy_of((0,)))
    one.steps(70, 4, 4)
    assert one.plan() == {} == one.policy.drafts


@pytest.mark.parametrize(
    "changes",
    [
        {"self.drafts = plan.drafts": "pass"},
        {"self._drafting = self._acceptance.expected()": "pass"},
    ],
    ids=["plans are not used", "acceptance is not used"],
)
def test_wrong_plans_are_seen(changes: dict[str, str]) -> None:
    with mutated(AdaptivePolicy._decide, changes), pytest.raises((AssertionError, KeyError)):
        check_draft_lengths()


@pytest.mark.parametrize(
    ("schedule", "expected"), [(None, (0, 1, 2, 4)), ([(1, 8, 4)], (0,))], ids=["none", "given"]
)
def test_a_users_schedule_is_left_alone(schedule: Any, expected: tuple[int, ...]) -> None:
    config: Any = SimpleNamespace(
        num_speculative_tokens=4, num_speculative_tokens_per_batch_size=schedule
    )
    assert lengths_to_plan(config) == expected
    assert lengths_to_plan(None) == (0,)


# ---------------------------------------------------------------- what the engine tells


def a_step(k: int, drafts: dict[str, list[int]]) -> Any:
    tokens = {one: 1 + len(drafts.get(one, ())) for one in "abc"}
    return SimpleNamespace(
        num_spec_tokens_to_schedule=k,
        scheduled_spec_decode_tokens=drafts,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list("abc"), num_computed_tokens=[20, 30, 40], num_output_tokens=[5, 5, 5]
        ),
    )


def an_output(generated: dict[str, int]) -> Any:
    return SimpleNamespace(
        sampled_token_ids=[[7] * count for count in generated.values()],
        req_id_to_index={one: index for index, one in enumerate(generated)},
    )


def test_accepted_drafts() -> None:
    step = a_step(4, {"a": [1, 2], "b": [3], "c": []})
    assert accepted_drafts(step, an_output({"a": 3, "b": 1, "c": 1})).tolist() == [2, 0]
    # A request that was discarded in the step gives nothing; one that is gone, too.
    assert accepted_drafts(step, an_output({"a": 0, "c": 1})).tolist() == []


def told(switch_between: bool = False) -> list[tuple[int, int, list[int]]]:
    """What a policy hears of two steps of a replica."""
    heard: list[tuple[int, int, list[int]]] = []
    policy: Any = SimpleNamespace(
        learns=True,
        stepped=lambda *args: None,
        switched=lambda report: None,
        drafted=lambda now, length, requests, accepted: heard.append(
            (length, requests, accepted.tolist())
        ),
    )
    history: Any = SimpleNamespace(
        step=lambda *args: None, drafts=lambda *args: None, switch=lambda report: None
    )
    requests: Any = SimpleNamespace(move=lambda replicas: None)
    monitor = Monitor(policy, history, requests, speculates=True)
    replica: Any = SimpleNamespace(index=0, cadence=lambda now, seconds: seconds)
    for k, drafts in ((4, {}), (2, {"a": [1, 2, 3, 4], "b": [5]})):
        output = an_output({"a": 3 if drafts else 1, "b": 1, "c": 1})
        result: Any = SimpleNamespace(seconds=0.1, output=output)
        monitor.stepped(Layout(1, 1), replica, a_step(k, drafts), 1, result)
        if switch_between:
            monitor.switched(None, [])  # type: ignore[arg-type]
    return heard


def test_a_policy_hears_of_the_length_that_the_drafts_were_made_with() -> None:
    assert told() == [(0, 3, []), (4, 3, [2, 0])]
    # At a switch drafts are dropped.
    assert told(switch_between=True)[1][0] == 0


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (Monitor.stepped, {"self.policy.drafted(now, asked,": "self.policy.drafted(now, shape.k,"}),
        (Monitor.switched, {"self._asked.clear()": "pass"}),
    ],
    ids=["the length of the next drafts", "over a switch"],
)
def test_wrong_lengths_are_noticed(method: Any, changes: dict[str, str]) -> None:
    with mutated(method, changes), pytest.raises(AssertionError):
        test_a_policy_hears_of_the_length_that_the_drafts_were_made_with()
