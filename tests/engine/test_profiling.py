"""A real engine's profile: taken by the command, loaded, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import pat_vllm
from pat_vllm.cli import profile as command
from pat_vllm.layout import Layout
from pat_vllm.profile import Profile, ProfileError
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling import load, quality
from pat_vllm.profiling.grid import Plan, StepPoint
from pat_vllm.profiling.runner import Profiler
from pat_vllm.profiling.synthetic_steps import SyntheticSteps
from tests.engine.specs import DENSE, DRAFTS
from tests.engine.speculation.batch import batch
from tests.engine.speculation.in_workers import generated
from tests.support.engines import Job, run, scheduler_of
from tests.unit.profiling.test_quality import NOISY
from tests.unit.test_profile import step
from tests.vllm.scheduler.protocol import MOST

pytestmark = pytest.mark.engine(DENSE)

ONE, TWO = Layout(1, 2), Layout(2, 1)


def jobs() -> dict[str, Job]:
    """Greedy, seeded and unseeded requests."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, {}]
    return {
        f"job-{i}": Job(
            list(range(5, 40 + 7 * i)), {"max_tokens": 12, "ignore_eos": True, **kinds[i % 3]}
        )
        for i in range(9)
    }


def known_requests(worker: Any) -> int:
    return sum(
        len(runtime.runner.requests) + runtime.runner.input_batch.num_reqs
        for runtime in worker._runtimes.values()
    )


def start_plan(llm: Any) -> Plan:
    scheduler = scheduler_of(llm)
    executor = scheduler.replica_set.executor
    return Plan.of(load.engine_limits(executor, scheduler.kv_cache_config))


def test_the_command_takes_a_profile_and_leaves_no_trace(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are those of an engine that was not profiled."""

    @contextmanager
    def shared_engine(*_: Any) -> Iterator[Any]:
        yield llm

    # What is sampled without a seed depends on the last switch.
    assert pat_vllm.switch(llm, tp=2) and pat_vllm.switch(llm, tp=1)
    before = run(llm, jobs())

    monkeypatch.setattr(command, "_engine", shared_engine)
    printed = StringIO()
    path = tmp_path / "profile.json"
    options = command.ProfileOptions(output=path, budget=1e6)
    command.take_profile(Console(file=printed, width=120), {}, options)

    executor = scheduler_of(llm).replica_set.executor
    assert executor.collective_rpc(known_requests) == [0, 0]
    assert run(llm, jobs()) == before

    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    text = printed.getvalue()
    assert "tp1dp2" in text and "tp2dp1" in text and path.name in text
    profile = Profile.load(path)
    points = start_plan(llm).points
    assert len(profile.steps) == sum(isinstance(point, StepPoint) for point in points)
    for live in (0, 1, 8):
        for pair in permutations((ONE, TWO)):
            assert any((s.source, s.target, s.num_seqs) == (*pair, live) for s in profile.switches)
    assert all(
        s.kv_bytes == profile.kv_bytes_per_token * s.num_seqs * 256 for s in profile.switches
    ), "whole blocks of 32 tokens, 247 or so tokens each"


def test_a_used_up_budget_leaves_the_essential_points(llm: Any) -> None:
    plan = replace(start_plan(llm), budget=1e-6, overtime=0.0)
    samples = measured(llm, plan)
    assert len(samples.steps) == plan.essential
    assert samples.skipped == len(plan.points) - plan.essential
    assert {s.layout for s in samples.steps} == {ONE, TWO}


def test_a_slow_engine_takes_longer_rather_than_a_profile_that_is_not_kept(llm: Any) -> None:
    plan = replace(start_plan(llm), budget=1e-6, overtime=1e6)
    samples = measured(llm, plan)
    assert samples.skipped == int(quality.MOST_LEFT_OUT * len(plan.points))


def measured(llm: Any, plan: Plan) -> Profiler:
    """What the idle engine measures of a plan."""
    active = scheduler_of(llm).replica_set
    active.drain()
    samples = Profiler(active.executor, plan, active.factory.seconds_to_make).run()
    scheduler_of(llm).reset_prefix_cache()
    return samples


def test_a_busy_engine_is_not_profiled(llm: Any) -> None:
    refused = []

    def ask(at: int) -> None:
        if at == 3:
            with pytest.raises(RuntimeError, match="idle"):
                llm.collective_rpc("pat_profile", kwargs={"seconds": 1.0})
            refused.append(at)

    run(llm, jobs(), ask)
    assert refused


def test_a_profile_is_loaded_or_measured(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAT_CACHE_DIR", str(tmp_path / "cache"))
    scheduler = scheduler_of(llm)
    measured: list[Any] = []
    samples = SimpleNamespace(steps=(step(ONE), step(TWO)), switches=(), skipped=0)

    def measure(profiler: Profiler) -> SimpleNamespace:
        measured.append(profiler)
        return samples

    monkeypatch.setattr(load.Profiler, "run", measure)
    warnings: list[str] = []
    monkeypatch.setattr(load.logger, "warning", lambda text, *rest: warnings.append(text % rest))

    def get(path: Path | None = None) -> Profile:
        return load.load_or_measure(
            scheduler.replica_set.executor,
            scheduler.kv_cache_config,
            str(path) if path else None,
            scheduler.replica_set.factory.seconds_to_make,
        )

    # What is noisy or incomplete is told, and not kept.
    good, noisy = samples, step(ONE, times=NOISY, low=0.003, high=0.089)
    for changed, problem in (
        ({"steps": (noisy, step(TWO))}, "noisy: in 1 of 2 steps"),
        ({"skipped": 34}, "incomplete: 34 of"),
    ):
        samples = SimpleNamespace(**vars(good) | changed)
        profile = get()
        assert profile.steps == samples.steps and profile_cache.find(profile.key) is None
        warning = warnings.pop()
        assert problem in warning and "pat-vllm profile MODEL --budget" in warning and not warnings
    measured.clear()
    samples = good
    first = get()
    assert not warnings
    assert len(measured) == 1 and first.layouts == (ONE, TWO) and len(first.steps) == 2
    assert get() == first and len(measured) == 1

    profile_cache.cache_path(first.key).write_text("{")
    again = get()
    assert len(measured) == 2 and profile_cache.find(first.key) == again

    # A file that the user names; it may be of an engine with a little more memory for KV.
    named = tmp_path / "named.json"
    first.model_copy(update={"kv_tokens": {1: 64, 2: 128}, "note": "mine"}).save(named)
    assert get(named) == first.model_copy(update={"note": "mine"}) and len(measured) == 2
    first.model_copy(update={"key": {**first.key, "max_num_seqs": 1}}).save(named)
    with pytest.raises(ProfileError, match=r"max_num_seqs is {'1': 16, '2': 32} here and 1"):
        get(named)
    named.write_text("{")
    with pytest.raises(ProfileError, match="is no JSON"):
        get(named)


def serve(llm: Any) -> list[Any]:
    """Answers without drafts, and with the longest."""
    answers = []
    for length in (0, MOST):
        pat_vllm.speculate(llm, length)
        answers.append(run(llm, batch(4, longest=40)))
        assert llm.reset_prefix_cache()
    return answers


@pytest.mark.engine(DRAFTS)
def test_a_speculating_engine_is_profiled(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples have the sizes of the steps that were made, and serving goes on as before."""
    before = serve(llm)
    plan = start_plan(llm)
    steps = [p for p in plan.points if isinstance(p, StepPoint) and p.batch and p.context < 100]
    chosen = [p for p in steps if p.k or (p.batch in (1, 16, 32) and p.busy == p.layout.replicas)]
    assert {(p.k, p.hits) for p in chosen} == {(0, False), (2, True), (MOST, True), (MOST, False)}

    executor, end = scheduler_of(llm).replica_set.executor, SyntheticSteps.end
    compared: list[tuple[Any, Any]] = []

    def ending(stream: SyntheticSteps) -> Any:
        """Runners and the stream have counted as many tokens of each request."""
        names = [request.request_id for request in stream._decoding]
        for worker in executor.collective_rpc(generated):
            if held := {name: len(worker[name]) for name in names if name in worker}:
                compared.append((held, stream._generated.copy()))
        return end(stream)

    with monkeypatch.context() as patch:
        patch.setattr(SyntheticSteps, "end", ending)
        samples = measured(llm, replace(plan, points=(*chosen,), essential=len(chosen)))
    assert compared and all(held == counted for held, counted in compared)
    assert serve(llm) == before

    header = load.profile_header(executor, scheduler_of(llm).kv_cache_config)
    assert header["key"]["speculation"]["draft_lengths"] == [0, 1, 2, MOST]
    for point, sample in zip(chosen, samples.steps, strict=True):
        shape = sample.shape
        assert (sample.layout, shape.batch, shape.busy) == (point.layout, point.batch, point.busy)
        assert (shape.k, shape.drafts) == (point.k, point.k * point.batch * point.hits)
        assert len(sample.times) == min(16, sample.repeats) >= 3
        least = sum(point.contexts) + 2 * point.batch
        assert least <= shape.context <= least + 32 * point.batch
