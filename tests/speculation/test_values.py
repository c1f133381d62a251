"""Draft lengths, counts and statistics, without an engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import StepShape
from pat_vllm.reporting import History, Report
from pat_vllm.reporting import history as history_module
from pat_vllm.scheduler.requests import counted_drafts, step_shape
from pat_vllm.scheduler.speculation import DraftLengths
from pat_vllm.scheduler.stats import add_spec_decoding_stats
from pat_vllm.speculation import Schedule, draft_lengths, every_length
from tests.support.mutation import mutated

ONE, TWO = Layout(1, 2), Layout(2, 1)

# ---------------------------------------------------------------- which are kept ready


@given(
    st.integers(1, 128),
    st.none() | st.lists(st.tuples(st.just(1), st.just(9), st.integers(0, 200)), max_size=3),
)
def test_lengths_that_are_kept_ready(longest: int, schedule: Any) -> None:
    lengths = draft_lengths(longest, schedule)
    assert list(lengths) == sorted(set(lengths))
    assert lengths[0] == 0 and lengths[-1] == longest
    named = {min(longest, one) for _, _, one in schedule or ()}
    assert named <= set(lengths)
    assert all(one & (one - 1) == 0 for one in set(lengths) - named - {longest})
    # From any one the next is at most twice as long.
    assert all(b <= max(1, 2 * a) for a, b in itertools.pairwise(lengths))


@given(st.integers(1, 128), st.integers(1, 300))
def test_a_runner_is_told_of_every_length(longest: int, batch: int) -> None:
    lengths = draft_lengths(longest, None)
    table = build_dynamic_sd_schedule_lookup(every_length(lengths), batch, longest)
    assert len(table) == batch + 1
    assert table[1:] == [lengths[min(i, len(lengths) - 1)] for i in range(batch)]


# ---------------------------------------------------------------- which is used


def config(longest: int = 4, schedule: Any = None) -> Any:
    return SimpleNamespace(
        num_speculative_tokens=longest, num_speculative_tokens_per_batch_size=schedule
    )


def replicas(number: int, most: int = 6) -> list[Any]:
    limits = SimpleNamespace(max_num_seqs=most)
    return [
        SimpleNamespace(scheduler=SimpleNamespace(scheduler_config=limits, dynamic_sd_lookup=None))
        for _ in range(number)
    ]


def tables(active: list[Any]) -> list[list[int]]:
    return [one.scheduler.dynamic_sd_lookup for one in active]


def check_draft_lengths() -> None:
    """Through requests, switches and ends of work."""
    of_policy: dict[Layout, Schedule] = {TWO: ((1, 1, 1),)}
    lengths = DraftLengths(config(), lambda: of_policy)
    two, one = replicas(2), replicas(1)
    lengths.write(ONE, two)
    assert tables(two) == [[4] * 7] * 2
    lengths.write(TWO, one)
    assert tables(one) == [[0] + [1] * 6]
    lengths.request(2)
    assert tables(one) == [[0] + [1] * 6]
    lengths.write(TWO, one)
    assert tables(one) == [[2] * 7]
    # The policy's change with its plans.
    lengths.request(None)
    lengths.write(TWO, one)
    of_policy = {TWO: ((1, 2, 4), (3, 3, 0))}
    lengths.write(TWO, one)
    assert tables(one) == [[0, 4, 4, 0, 0, 0, 0]]
    lengths.request(2)
    two = replicas(2)
    lengths.write(ONE, two)
    assert tables(two) == [[2] * 7] * 2
    lengths.request(0)
    lengths.write(ONE, two)
    assert tables(two) == [[0] * 7] * 2
    lengths.request(None)
    lengths.write(ONE, two)
    assert tables(two) == [[4] * 7] * 2
    # The end of the work takes back what was used in it, and not what is for the next.
    lengths.request(2)
    lengths.write(ONE, two)
    lengths.release()
    lengths.write(ONE, two)
    assert tables(two) == [[4] * 7] * 2
    lengths.request(2)
    lengths.release()
    lengths.write(ONE, two)
    assert tables(two) == [[2] * 7] * 2


def check_users_schedule() -> None:
    """It holds where nothing else was said."""
    lengths = DraftLengths(config(4, [(1, 2, 4), (3, 4, 3)]), lambda: {TWO: ((1, 1, 0),)})
    two, one = replicas(2), replicas(1)
    assert lengths.allowed == (0, 1, 2, 3, 4)
    lengths.write(ONE, two)
    assert tables(two) == [[0, 4, 4, 3, 3, 3, 3]] * 2
    lengths.write(TWO, one)
    assert tables(one) == [[0] * 7]
    lengths.request(3)
    lengths.write(TWO, one)
    assert tables(one) == [[3] * 7]


def test_draft_lengths() -> None:
    check_draft_lengths()
    check_users_schedule()


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        pytest.param(
            DraftLengths.write,
            {"self._written == (requested, of_policy, replicas)": "self._written[0] == requested"},
            id="not written after a switch",
        ),
        pytest.param(
            DraftLengths.write,
            {"self._written == (requested, of_policy, replicas)": "self._written[2] == replicas"},
            id="not written after a request",
        ),
        pytest.param(
            DraftLengths._table, {"requested is not None": "requested"}, id="0 is not a length"
        ),
        pytest.param(
            DraftLengths.write,
            {
                "self._written == (requested, of_policy, replicas)": (
                    "self._written[::2] == (requested, replicas)"
                )
            },
            id="not written after a plan",
        ),
        pytest.param(
            DraftLengths._table, {"planned or self": "self"}, id="the policy's are not heard"
        ),
        pytest.param(DraftLengths.release, {"self._requested = None": "pass"}, id="holds for ever"),
        pytest.param(
            DraftLengths.request,
            {"self._asked.put(length)": "self._requested = length"},
            id="the end of the work takes back what is for the next",
        ),
    ],
)
def test_wrong_draft_lengths_are_seen(function: Any, changes: dict[str, str]) -> None:
    with mutated(function, changes), pytest.raises(AssertionError):
        test_draft_lengths()


@pytest.mark.parametrize("length", [-1, 3, 5, "2", 2.0, True, [1]])
def test_lengths_that_are_refused(length: Any) -> None:
    lengths = DraftLengths(config(), dict)
    with pytest.raises(ValueError, match=r"the engine keeps \[0, 1, 2, 4\] ready"):
        lengths.request(length)


def test_an_engine_that_does_not_speculate() -> None:
    lengths = DraftLengths(None, dict)
    with pytest.raises(ValueError, match=r"cannot use 2 draft tokens.*does not speculate"):
        lengths.request(2)
    lengths.request(None)
    active = replicas(1)
    lengths.write(ONE, active)
    assert tables(active) == [None]


# ---------------------------------------------------------------- shapes and counts


def a_step(requests: dict[str, tuple[int, int, int]], new: dict[str, int]) -> SchedulerOutput:
    """Cached requests: name -> (context, tokens scheduled, drafts among them); new: tokens."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = replace(
        CachedRequestData.make_empty(),
        req_ids=list(requests),
        num_computed_tokens=[context for context, _, _ in requests.values()],
    )
    step.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in new]  # type: ignore[misc]
    step.num_scheduled_tokens = {name: one for name, (_, one, _) in requests.items()} | new
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    step.scheduled_spec_decode_tokens = {
        name: [7] * drafts for name, (_, _, drafts) in requests.items() if drafts
    }
    return step


def check_shapes() -> None:
    """Decodes with drafts are not prefill."""
    assert step_shape(a_step({"a": (10, 1, 0), "b": (20, 1, 0)}, {}), 2) == (
        StepShape(2, 32, 21, prefill=0, busy=2, drafts=0)
    )
    assert step_shape(a_step({"a": (10, 5, 4), "b": (20, 3, 2)}, {}), 1) == (
        StepShape(2, 32, 21, prefill=0, busy=1, drafts=6)
    )
    # Beside a chunk of a prompt, and a new one, too.
    assert step_shape(a_step({"a": (10, 5, 4), "chunk": (30, 8, 0)}, {}), 1) == (
        StepShape(1, 11, 11, prefill=8, busy=1, drafts=4)
    )
    mixed = {"a": (10, 5, 4), "b": (20, 1, 0), "chunk": (30, 8, 0)}
    assert step_shape(a_step(mixed, {"new": 50}), 1) == (
        StepShape(2, 32, 21, prefill=58, busy=1, drafts=4)
    )
    assert step_shape(a_step({}, {"new": 50}), 1) == StepShape(0, 0, 0, prefill=50)
    # The drafter runs after each of them.
    for requests in ({"a": (10, 5, 4)}, {"a": (10, 5, 4), "chunk": (30, 8, 0)}, {}):
        step = a_step(requests, {})
        step.num_spec_tokens_to_schedule = 4
        assert step_shape(step, 1) == replace(step_shape(a_step(requests, {}), 1), k=4)


def test_shapes() -> None:
    check_shapes()


@pytest.mark.parametrize(
    "changes",
    [
        {"== 1 + len(drafts_of.get(request_id, ()))": "== 1"},
        {"tokens - len(decoding) - drafts": "tokens - len(decoding)"},
        {"tokens == requests + drafts and not": "tokens >= requests + drafts and not"},
        {"0, busy, drafts, k)": "0, busy, drafts)"},
        {"prefill, busy, drafts, k)": "prefill, busy, drafts)"},
    ],
    ids=[
        "with drafts no decode",
        "drafts count twice",
        "chunks are decodes",
        "decodes do not draft",
        "chunks do not draft",
    ],
)
def test_wrong_shapes_are_seen(changes: dict[str, str]) -> None:
    with mutated(step_shape, changes), pytest.raises(AssertionError):
        check_shapes()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=6))
def test_counted_drafts(requests: list[tuple[int, int, bool]]) -> None:
    """Requests with drafts, of which some are accepted, or of which none is sampled."""
    named = {f"r{i}": (10, 1 + drafts, drafts) for i, (drafts, _, _) in enumerate(requests)}
    sampled = [
        [7] * (1 + min(drafts, right)) if samples else [] for drafts, right, samples in requests
    ]
    names = list(named)
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=sampled,
    )
    drafted = sum(drafts for drafts, _, _ in requests)
    accepted = sum(min(drafts, right) for drafts, right, samples in requests if samples)
    assert counted_drafts(a_step(named, {}), output) == (drafted, accepted)


# ---------------------------------------------------------------- the report


def test_history_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a replica with one length and in one layout count together, for a second."""
    history = History()
    for at, layout, replica, length, drafted, accepted in [
        (1.0, ONE, 0, 4, 0, 0),
        (1.1, ONE, 1, 4, 4, 1),
        (1.2, ONE, 0, 4, 8, 5),
        (1.9, ONE, 0, 4, 8, 8),
        (2.1, ONE, 0, 4, 4, 2),  # more than a second after the first
        (2.2, ONE, 0, 2, 4, 3),  # another length
        (2.3, TWO, 0, 2, 2, 2),  # another layout
    ]:
        history.drafts(at, layout, replica, length, drafted, accepted)
    found = history.report(TWO, [ONE, TWO]).drafts
    assert [
        (one.at, one.layout, one.replica, one.num_speculative_tokens, one.steps) for one in found
    ] == [
        (1.0, ONE, 0, 4, 3),
        (1.1, ONE, 1, 4, 1),
        (2.1, ONE, 0, 4, 1),
        (2.2, ONE, 0, 2, 1),
        (2.3, TWO, 0, 2, 1),
    ]
    assert [(one.drafted, one.accepted) for one in found] == [
        (16, 13),
        (4, 1),
        (4, 2),
        (4, 3),
        (2, 2),
    ]
    report = history.report(TWO, [ONE, TWO], since=2.15)
    assert report.drafts == found[3:]
    assert Report.from_json(report.to_json()) == report

    monkeypatch.setattr(history_module, "MAX_RECORDS", 3)
    short = History()
    for at in range(10):
        short.drafts(float(at), ONE, 0, 4, 4, at)
    kept = short.report(ONE, [ONE]).drafts
    assert [one.at for one in kept] == [6.0, 7.0, 8.0, 9.0]


# ---------------------------------------------------------------- statistics


counts = st.lists(st.integers(0, 4), max_size=8)


@given(counts, counts)
def test_statistics_of_replicas_add_up(one: list[int], other: list[int]) -> None:
    def stats(accepted: list[int]) -> SpecDecodingStats:
        made = SpecDecodingStats.new(4)
        for count in accepted:
            made.observe_draft(num_draft_tokens=4, num_accepted_tokens=count)
        return made

    merged = stats(one)
    add_spec_decoding_stats(merged, stats(other))
    assert merged == stats(one + other)
