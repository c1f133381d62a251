"""Profiles of engines that speculate: points, their synthetic steps, and what one measures."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import pat_vllm
from pat_vllm.cli import app
from pat_vllm.cli import profile as command
from pat_vllm.cli.profile import draft_lines
from pat_vllm.layout import Layout
from pat_vllm.profiling import plan as plans
from pat_vllm.profiling.header import _draft_lengths
from pat_vllm.profiling.key import profile_key, title
from pat_vllm.profiling.plan import ProfilePlan, estimate
from pat_vllm.profiling.points import POINTS, EngineLimits, StepPoint
from pat_vllm.profiling.profile import Profile, StepSample, StepShape
from pat_vllm.profiling.stream import Stream
from tests.engines import run, scheduler_of
from tests.models import random_model
from tests.speculation.batch import batch
from tests.speculation.in_workers import generated
from tests.speculation.steps import MOST, SPECULATIVE
from tests.support.mutation import mutated
from tests.test_profiling import RESOLVED, _engine_config, profile

ONE, TWO = Layout(1, 2), Layout(2, 1)

LIMITS = EngineLimits(
    layouts=(ONE, TWO),
    max_num_seqs={1: 64, 2: 128},
    max_batch_tokens={1: 512, 2: 1024},
    max_model_len=4096,
    block_size=16,
    blocks={1: 2000, 2: 4000},
    draft_lengths=(1, 2, 4, 7),
    misses=True,
)


# ---------------------------------------------------------------- points


def drafting(plan: ProfilePlan) -> list[StepPoint]:
    return [point for point in plan.points if isinstance(point, StepPoint) and point.k]


@pytest.mark.parametrize("make", [ProfilePlan.quick, ProfilePlan.full], ids=["quick", "full"])
def test_engines_that_do_not_speculate_have_the_same_points(make: Any) -> None:
    with_drafts = make(LIMITS)
    without = make(replace(LIMITS, draft_lengths=()))
    assert not drafting(without)
    assert {*without.points} == {*with_drafts.points} - {*drafting(with_drafts)}
    first = with_drafts.points[: with_drafts.essential]
    assert without.points[: without.essential] == tuple(p for p in first if not p.k)


def check_essential_drafts() -> None:
    plan = ProfilePlan.quick(LIMITS)
    first = drafting(replace(plan, points=plan.points[: plan.essential]))
    assert {(p.layout, p.hits) for p in first} == {
        (layout, hits) for layout in (ONE, TWO) for hits in (True, False)
    }


def test_no_layout_is_without_drafts_however_slow_the_machine() -> None:
    """Drafts would seem to cost nothing in it, and real steps could not tell (`comparable`)."""
    check_essential_drafts()


def test_essential_drafts_that_are_forgotten_are_noticed() -> None:
    changes = {"if limits.draft_lengths": "if False"}
    with mutated(plans._essential, changes), pytest.raises(AssertionError):
        check_essential_drafts()


def test_quick_points_with_drafts() -> None:
    """The longest length and one in the middle, for one request and for many, in each layout."""
    plan = ProfilePlan.quick(LIMITS)
    found = {(p.layout, p.batch, p.k, p.hits) for p in drafting(plan)}
    assert found == {
        (layout, number, k, hits)
        for layout, many in ((ONE, 64), (TWO, 128))
        for number in (1, 8, many)
        for k, hits in ((7, True), (7, False), (2, True))
        if number != 8 or k == 7
    }
    # So many requests are measured without drafts, too, to compare with; and all are early.
    plain = {(p.layout, p.batch) for p in plan.points if isinstance(p, StepPoint) and not p.k}
    assert {(layout, number) for layout, number, _, _ in found} <= plain
    assert plan.points.index(drafting(plan)[-1]) <= len(plan.points) / 2


def test_full_points_with_drafts() -> None:
    points = drafting(ProfilePlan.full(LIMITS))
    for layout, most in ((ONE, 64), (TWO, 128)):
        short = [p for p in points if p.layout == layout and p.context == LIMITS.short]
        for k in LIMITS.draft_lengths:
            batches = {p.batch for p in short if p.k == k and p.hits}
            assert batches == {1 << n for n in range(most.bit_length())}
        assert {p.batch for p in short if not p.hits} == batches
        assert {p.k for p in short if not p.hits} == {7}
        # The drafter searches the whole context.
        far = [p for p in points if p.layout == layout and p.context > 4 * LIMITS.short]
        assert {(p.k, p.hits) for p in far} == {(7, True), (7, False), (2, True)}


def test_drafts_that_are_always_verified_are_never_missed() -> None:
    limits = replace(LIMITS, misses=False)
    for plan in (ProfilePlan.quick(limits), ProfilePlan.full(limits)):
        assert drafting(plan) and all(point.hits for point in drafting(plan))


@settings(deadline=None, max_examples=50)
@given(
    st.sets(st.integers(1, 16), min_size=1).map(lambda ks: tuple(sorted(ks))),
    st.integers(32, 40_000),
    st.integers(16, 2000),
    st.integers(1, 300),
)
def test_points_with_drafts_are_possible(
    lengths: tuple[int, ...], max_model_len: int, tokens: int, seqs: int
) -> None:
    blocks = -(-max_model_len // 16) + 10
    limits = replace(
        LIMITS,
        max_num_seqs={1: seqs, 2: 2 * seqs},
        max_batch_tokens={1: tokens, 2: 2 * tokens},
        max_model_len=max_model_len,
        blocks={1: blocks, 2: 2 * blocks},
        draft_lengths=lengths,
    )
    for point in drafting(ProfilePlan.full(limits)):
        assert point.batch <= limits.max_num_seqs[point.layout.tp]
        assert point.batch * (1 + point.drafts) <= limits.max_batch_tokens[point.layout.tp]
        ends = [c + limits.room_for(point.drafts) + 1 for c in point.contexts]
        assert max(ends) <= max_model_len
        assert sum(-(-end // 16) for end in ends) <= limits.blocks[point.layout.tp]
        [values] = json.loads(json.dumps(POINTS.dump_python([point])))
        assert POINTS.validate_python([values]) == [point]


def test_estimates_count_drafts() -> None:
    sample = dict(layout=ONE, batch=8, context=800, longest=100, repeats=3, k=4)
    seconds = dict(seconds=0.1, low=0.1, high=0.1)
    known = [StepSample.model_validate(sample | seconds | {"drafts": 0, "k": 0})]
    assert estimate(StepPoint(ONE, 8, 100, 2, k=4, hits=True), known) >= 0.5 * 0.999
    assert estimate(StepPoint(ONE, 8, 100, 2, k=4), known) == pytest.approx(0.1)
    # What a step with drafts takes says little of one without.
    known.append(
        StepSample.model_validate(sample | {"seconds": 1e-3, "low": 1e-3, "high": 1e-3, "k": 4})
    )
    assert estimate(StepPoint(ONE, 8, 100, 2), known) == pytest.approx(0.1)


def _config(**speculative: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(random_model("qwen3")),
        enforce_eager=True,
        max_model_len=64,
        speculative_config=SPECULATIVE | speculative,
    ).create_engine_config()


def test_key_tells_engines_with_other_drafters_apart() -> None:
    configs = [
        _config(),
        _config(num_speculative_tokens=3),
        _config(num_speculative_tokens_per_batch_size=[(1, 8, 4), (9, 16, 3)]),
        _config(prompt_lookup_min=1),
        _config(prompt_lookup_max=3),
    ]
    # What is verified when does not change how long it takes.
    same = _config(num_speculative_tokens_per_batch_size=[(1, 8, 4), (9, 16, 0)])
    keys = [json.dumps(profile_key(one, RESOLVED)) for one in configs]
    assert len({*keys}) == len(keys)
    assert json.dumps(profile_key(same, RESOLVED)) == keys[0]
    plain = profile_key(_engine_config(), RESOLVED)
    assert "speculation" not in plain and "drafts" not in title(plain)
    assert title(json.loads(keys[0])).endswith("; ngram drafts")


def test_draft_lengths_that_can_be_measured() -> None:
    def lengths(gpu: bool, use_v2: bool) -> tuple[int, ...]:
        speculative = SimpleNamespace(
            use_ngram_gpu=lambda: gpu,
            num_speculative_tokens=7,
            num_speculative_tokens_per_batch_size=None,
        )
        config: Any = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=use_v2)
        return _draft_lengths(config)

    assert lengths(gpu=False, use_v2=False) == lengths(gpu=True, use_v2=True) == (1, 2, 4, 7)
    assert lengths(gpu=True, use_v2=False) == ()
    without: Any = SimpleNamespace(speculative_config=None)
    assert _draft_lengths(without) == ()


def test_a_profile_says_what_drafts_cost() -> None:
    def sample(layout: Layout, batch: int, k: int, seconds: float, **values: Any) -> StepSample:
        shape = StepShape(batch, 64 * batch, 64, 0, layout.replicas, k=k, **values)
        return StepSample.of(layout, shape, [seconds])

    steps = [sample(TWO, 1, 0, 0.001)]
    for number in (1, 8):
        for k in (0, 2, 4):
            seconds = 0.01 + 0.001 * k * number
            steps.append(sample(ONE, number, k, seconds, drafts=k * number))
    steps += [sample(ONE, 8, 4, 0.5, drafts=0), sample(ONE, 16, 0, 0.5)]
    made = profile().model_copy(update={"steps": tuple(steps)})
    (line,) = draft_lines(made)
    assert line == (
        "tp1dp2: ms of a step at batch 8, by drafts of a request: 0: 10.0, 2: 26.0, 4: 42.0"
    )


# ---------------------------------------------------------------- steps


def output_of(step: Any, accepted: list[int]) -> Any:
    """What a runner returns for a step: each request accepts so many of its drafts at most."""
    names = list(step.num_scheduled_tokens)
    drafts = step.scheduled_spec_decode_tokens
    sampled = [
        [7] * (1 + min(one, len(drafts.get(name, ()))))
        for name, one in zip(names, accepted, strict=True)
    ]
    return SimpleNamespace(req_ids=names, sampled_token_ids=sampled)


def drive(stream: Stream, k: int, hits: bool, depth: int, accepted: list[int]) -> int:
    """Run a stream until it is full, as a runner that accepts so many; returns the steps."""
    tokens: dict[str, int] = {}
    room: dict[str, int] = {}
    flying: list[Any] = []
    steps = 0
    while True:
        while not stream.full and len(flying) < depth:
            step = stream.next()
            steps += 1
            assert step.num_spec_tokens_to_schedule == k
            for new in step.scheduled_new_reqs:
                tokens[new.req_id] = len(new.prompt_token_ids)
                room[new.req_id] = LIMITS.block_size * len(new.block_ids[0])
            cached = step.scheduled_cached_reqs
            for name, computed, outputs in zip(
                cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
            ):
                drafts = step.scheduled_spec_decode_tokens.get(name, [])
                assert len(drafts) == (k if hits else 0)
                assert step.num_scheduled_tokens[name] == 1 + len(drafts)
                # What is in flight counts as accepted.
                ahead = sum(one.num_scheduled_tokens[name] for one in flying)
                assert computed == tokens[name] - 1 + ahead
                assert computed + 1 + len(drafts) <= room[name]
                assert outputs == computed + 1 - 20
            flying.append(step)
        if not flying:
            return steps
        output = output_of(flying.pop(0), accepted)
        stream.finished(output)
        for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            tokens[name] += len(sampled)


def check_streams() -> None:
    for depth in (1, 2):
        for k, hits in ((0, False), (4, True), (4, False), (7, True)):
            for accepted in ([0, 0, 0], [7, 7, 7], [0, 2, 5]):
                point = StepPoint(ONE, 3, 20, 1, k=k, hits=hits)
                stream = Stream(point, LIMITS, "r", False, 1000)
                steps = drive(stream, k, hits, depth, accepted)
                assert steps >= (5 if depth == 1 else 3)
                contexts, longest = stream.sizes[0]
                assert (contexts, longest) == (60, 20)
                if not point.drafts:
                    assert stream.sizes == [(3 * (20 + n), 20 + n) for n in range(steps)]
                    assert steps == LIMITS.room + 1
                assert len(stream.sizes) == steps


def test_streams_count_what_is_accepted_as_vllm_does() -> None:
    check_streams()


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (Stream.finished, {"1 + drafts - len(sampled)": "0"}),
        (Stream.finished, {"1 + drafts - len(sampled)": "drafts"}),
        (Stream.next, {"+= 1 + drafts": "+= 1"}),
        (Stream.next, {"drafts = self._point.drafts": "drafts = 0"}),
        (Stream.next, {"= self._point.k": "= drafts"}),
        (Stream.full, {"+ self._point.drafts > ": "> 2 * "}),
    ],
    ids=["all right", "none right", "not ahead", "no drafts", "asked for few", "never full"],
)
def test_wrong_streams_are_seen(function: Any, changes: dict[str, str]) -> None:
    with mutated(function, changes), pytest.raises(AssertionError):
        check_streams()


def test_contexts_repeat_themselves_only_where_drafts_are_found() -> None:
    def contexts(**values: Any) -> list[list[int]]:
        step = Stream(StepPoint(ONE, 2, 40, 1, **values), LIMITS, "r", False, 1000).next()
        found = [one.prompt_token_ids for one in step.scheduled_new_reqs]
        assert all(isinstance(one, list) and len(one) == 40 for one in found)
        return found  # type: ignore[return-value]

    assert contexts() == contexts(k=4, hits=True) == [[1] * 40] * 2
    for one in contexts(k=4):
        assert len({*one}) == 40


# ---------------------------------------------------------------- a real engine


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_a_speculating_engine_is_profiled(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples have the sizes of the steps that were made, and serving goes on as before."""
    scheduler = scheduler_of(llm)
    executor = scheduler.replica_set.executor
    steps: dict[str, list[Any]] = defaultdict(list)
    proposed: dict[str, list[int]] = defaultdict(list)
    wrong: list[Any] = []
    compared: list[int] = []
    execute, finished, end = executor.execute_model, executor.finished, Stream.end

    def executing(output: Any, *args: Any, **options: Any) -> Any:
        for step in output.steps.values():
            if step.scheduled_cached_reqs.req_ids:
                prefix = step.scheduled_cached_reqs.req_ids[0].rpartition("-")[0]
                steps[prefix].append(step)
        return execute(output, *args, **options)

    def finishing(*args: Any, **options: Any) -> Any:
        results = finished(*args, **options)
        for result in results:
            if result.drafts is not None:
                for name, found in zip(
                    result.drafts.req_ids, result.drafts.draft_token_ids, strict=True
                ):
                    proposed[name.rpartition("-")[0]].append(len(found))
        return results

    def ending(stream: Stream) -> Any:
        names = [one.request_id for one in stream._decoding]
        for worker in executor.collective_rpc(generated):
            held = {name: len(worker[name]) for name in names if name in worker}
            if held and held != stream._generated:
                wrong.append((held, stream._generated))
            compared.append(len(held))
        return end(stream)

    def serve() -> list[Any]:
        found = []
        for length in (0, MOST):
            pat_vllm.speculate(llm, length)
            found.append(run(llm, batch(4, longest=40)))
            assert llm.reset_prefix_cache()
        return found

    before = serve()
    (described,) = llm.collective_rpc("pat_profile", kwargs={"quick": True})
    quick = POINTS.validate_python(described["points"])
    chosen = [p for p in quick if isinstance(p, StepPoint) and p.batch and p.context < 100]
    chosen = [p for p in chosen if p.k or (p.batch in (1, 16, 32) and p.busy == p.layout.replicas)]
    assert {(p.k, p.hits) for p in chosen} == {(0, False), (2, True), (MOST, True), (MOST, False)}

    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute_model", executing)
        patch.setattr(executor, "finished", finishing)
        patch.setattr(Stream, "end", ending)
        (answer,) = llm.collective_rpc("pat_profile", args=(POINTS.dump_python([*chosen]), True))
    assert any(compared) and not wrong, wrong[:3]
    assert serve() == before

    made = Profile(**described["header"], created="now", steps=answer["steps"])
    assert made.key["speculation"]["draft_lengths"] == [0, 1, 2, MOST]
    assert made.title.endswith("; ngram drafts")
    assert len(made.steps) == len(chosen)
    for point, sample in zip(chosen, made.steps, strict=True):
        assert (sample.layout, sample.batch, sample.busy) == (
            point.layout,
            point.batch,
            point.busy,
        )
        assert (sample.k, sample.drafts) == (point.k, point.k * point.batch * point.hits)
        assert len(sample.times) == min(16, sample.repeats) >= 3
        least = sum(point.contexts) + 2 * point.batch
        assert least <= sample.context <= least + 32 * point.batch
    # Each replica that is busy at a point has a prefix, in this order.
    prefixes = iter(sorted(steps, key=lambda one: int(one.rpartition("-")[2])))
    for point in chosen:
        for prefix in itertools.islice(prefixes, point.busy):
            for step in steps[prefix]:
                assert step.num_spec_tokens_to_schedule == point.k
                drafts = [len(one) for one in step.scheduled_spec_decode_tokens.values()]
                assert drafts == [point.k] * point.batch * point.hits
            found = proposed[prefix]
            assert bool(found) == bool(point.k)
            if point.k and not point.hits:
                # Later steps may find something: this model's text repeats itself.
                assert not any(found[: point.batch])


# ---------------------------------------------------------------- the command


def test_a_profile_of_an_engine_that_speculates_is_asked_for_as_vllm_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(command, "take_profile", lambda console, engine, *rest: made.append(engine))
    config = {"method": "ngram", "num_speculative_tokens": 4}
    arguments = ["profile", "nowhere", "--speculative-config", json.dumps(config)]
    assert not CliRunner().invoke(app, arguments).exit_code
    assert made[0]["speculative_config"] == config
    assert not CliRunner().invoke(app, arguments[:2]).exit_code
    assert "speculative_config" not in made[1]
    for wrong in ("{", "[4]", "4"):
        result = CliRunner().invoke(app, [*arguments[:3], wrong])
        assert result.exit_code == 2 and len(made) == 2
        assert "--speculative-config takes a JSON object" in " ".join(result.output.split())
