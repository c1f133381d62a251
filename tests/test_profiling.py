"""Profiling: the plan, the cache and the unfinished file; then a real engine and the command."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.executor.messages import ResolvedKernels
from pat_vllm.layout import Layout
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling import profile as profile_module
from pat_vllm.profiling.plan import ProfilePlan, estimate
from pat_vllm.profiling.points import POINTS, EngineLimits, StepPoint, SwitchPoint
from pat_vllm.profiling.profile import (
    Profile,
    ProfileError,
    StepSample,
    StepShape,
    SwitchSample,
    thinned,
)
from tests.engines import OPTIONS, Job, engine, run, scheduler_of
from tests.models import random_model

KEY = {"model": {"hidden_size": 8}, "ranks": 2}


ONE, TWO = Layout(1, 2), Layout(2, 1)


def step(layout: Layout = ONE, **values: Any) -> StepSample:
    defaults = dict(batch=1, context=8, longest=8, seconds=0.1, low=0.1, high=0.1, repeats=3)
    return StepSample(layout=layout, **{**defaults, **values})


def profile(key: dict[str, Any] = KEY) -> Profile:
    return Profile(
        kind="measured",
        title="test",
        created="2000-01-01",
        key=key,
        ranks=2,
        layouts=(ONE, TWO),
        max_num_seqs={1: 4, 2: 8},
        max_batch_tokens={1: 8, 2: 16},
        kv_tokens={1: 64, 2: 128},
        kv_bytes_per_token=4,
        steps=(step(ONE), step(TWO)),
    )


# ---------------------------------------------------------------- the plan


@st.composite
def limits(draw: st.DrawFn) -> EngineLimits:
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    layouts = tuple(Layout.of(tp, ranks) for tp in (1, 2, 4, 8) if tp <= ranks)
    block_size = draw(st.sampled_from([16, 32, 128]))
    max_model_len = draw(st.integers(16, 40_000))
    # vLLM refuses to start when not even one longest context fits.
    blocks = -(-max_model_len // block_size) + draw(st.integers(1, 5000))
    return EngineLimits(
        layouts=layouts,
        max_num_seqs={layout.tp: draw(st.integers(1, 512)) for layout in layouts},
        max_batch_tokens={layout.tp: draw(st.integers(16, 16_384)) for layout in layouts},
        max_model_len=max_model_len,
        block_size=block_size,
        blocks={layout.tp: blocks * layout.tp for layout in layouts},
    )


@settings(deadline=None, max_examples=50)
@given(limits())
def test_plans_are_possible_and_fair(limits: EngineLimits) -> None:
    quick, full = ProfilePlan.quick(limits), ProfilePlan.full(limits)
    for plan in (quick, full):
        assert len(set(plan.points)) == len(plan.points)
        first = plan.points[: plan.essential]
        assert all(isinstance(point, StepPoint) and point.batch for point in first)
        in_first = {point.layout for point in first if isinstance(point, StepPoint)}
        assert in_first == {*limits.layouts}
        for point in plan.points:
            if not isinstance(point, StepPoint):
                continue
            assert 1 <= point.busy <= point.layout.replicas
            assert point.batch + point.prefill >= 1
            lengths = [c + limits.room + 1 for c in point.contexts]
            lengths += [p + 1 for p in limits.prompts(point.prefill)]
            assert max(lengths) <= limits.max_model_len
            assert min(lengths) > 1
            assert len(lengths) <= limits.max_num_seqs[point.layout.tp]
            blocks = sum(-(-n // limits.block_size) for n in lengths)
            assert blocks <= limits.blocks[point.layout.tp]
    assert full.points[: len(quick.points)] == quick.points
    assert len(quick.points) <= 40 * len(limits.layouts)


@settings(deadline=None, max_examples=50)
@given(limits())
def test_plans_measure_switches_both_ways(limits: EngineLimits) -> None:
    for plan in (ProfilePlan.quick(limits), ProfilePlan.full(limits)):
        pairs = {(p.source, p.target) for p in plan.points if isinstance(p, SwitchPoint)}
        assert pairs == {*itertools.permutations(limits.layouts, 2)}


@settings(deadline=None, max_examples=50)
@given(limits())
def test_points_survive_the_wire(limits: EngineLimits) -> None:
    for point in ProfilePlan.full(limits).points:
        [values] = json.loads(json.dumps(POINTS.dump_python([point])))
        assert POINTS.validate_python([values]) == [point]


@pytest.mark.parametrize(
    ("point", "least"),
    [
        # Twice the batch may take twice the time; half of it may take as long.
        (StepPoint(ONE, 16, 8, 2), 0.2),
        (StepPoint(ONE, 4, 8, 2), 0.1),
        # Nothing is known of this layout.
        (StepPoint(TWO, 8, 8, 1), 0.1),
        (StepPoint(ONE, 0, 0, 2, prefill=200), 0.6),
    ],
)
def test_estimates_do_not_promise_too_much(point: StepPoint, least: float) -> None:
    known = [
        step(batch=8, context=64),
        step(batch=0, context=0, longest=0, prefill=100, seconds=0.3, low=0.3, high=0.3),
    ]
    assert estimate(point, known) >= least * 0.999


def test_older_files_name_the_requests_of_a_switch_otherwise() -> None:
    values = {"source": ONE, "target": TWO, "tokens": 8, "kv_bytes": 0, "seconds": 0.1}
    older = SwitchSample.model_validate({**values, "live": 3, "kv": 0.0, "weights": 0.0})
    assert older.num_seqs == 3
    assert SwitchSample.model_validate(older.model_dump()) == older


def test_files_with_one_limit_for_all_layouts_are_read(tmp_path: Path) -> None:
    """As those of before are."""
    one = {"max_num_seqs": 4, "max_batch_tokens": 8}
    content = profile().model_dump(mode="json") | one
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"digest": profile_module._digest(content), **content}))
    found = Profile.load(path)
    assert found.max_num_seqs == {1: 4, 2: 4} and found.max_batch_tokens == {1: 8, 2: 8}
    found.save(path)
    assert Profile.load(path) == found
    for name in one:
        with pytest.raises(ValueError, match=f"{name} has no entry for tp=2"):
            Profile.model_validate(content | {name: {"1": 4}})


def test_a_sample_of_measured_times() -> None:
    shape = StepShape(4, 100, 30, 0, 2, drafts=8, k=2)
    sample = StepSample.of(TWO, shape, [0.3, 0.1, 0.2, 0.4])
    assert sample.shape == shape
    assert (sample.low, sample.seconds, sample.high, sample.repeats) == (0.1, 0.25, 0.4, 4)
    assert sample.times == (0.3, 0.1, 0.2, 0.4)
    assert StepSample.model_validate_json(sample.model_dump_json()) == sample
    assert StepSample.of(TWO, shape, [0.3]).times == ()


@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=100))
def test_times_are_thinned_evenly(times: list[float]) -> None:
    sample = StepSample.of(ONE, StepShape(1, 8, 8), times)
    places = [int(one) for one in thinned([float(i) for i in range(len(times))])]
    assert sample.times == tuple(times[one] for one in places)
    assert len(places) == min(len(times), 16)
    assert (places[0], places[-1]) == (0, len(times) - 1)
    gaps = {b - a for a, b in itertools.pairwise(places)}
    assert not gaps or min(gaps) >= max(1, max(gaps) - 1)
    assert sample.repeats == len(times)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ((0.1, 0.1, 0.2), "not those of its times"),
        ((0.1, 0.2, 0.2), "not those of its times"),
        ((0.05, 0.1, 0.1), "not those of its times"),
        ((0.1, 0.1, 0.1, 0.1), "4 times and 3 repeats"),
        ((0.1, 0.11), "not between its low and high"),
        ((0.09, 0.1), "not between its low and high"),
        ((0.0, 0.1, 0.1), "greater than 0"),
        ((0.1,) * 17, "at most 16 items"),
    ],
)
def test_times_that_do_not_fit_a_sample(times: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(times=times)


def test_files_without_drafts_and_times_are_read(tmp_path: Path) -> None:
    """As those of before are."""
    content = profile().model_dump(mode="json")
    for one in content["steps"]:
        for name in ("drafts", "k", "times"):
            del one[name]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"digest": profile_module._digest(content), **content}))
    assert Profile.load(path) == profile()


# ---------------------------------------------------------------- the cache


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_keeps_and_finds(cache: Path) -> None:
    assert profile_cache.find(KEY) is None
    path = profile_cache.keep(profile())
    assert path is not None and path.is_relative_to(cache)
    assert profile_cache.find(KEY) == profile()
    assert profile_cache.find({**KEY, "ranks": 4}) is None


def test_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PAT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert profile_cache.cache_path(KEY).parent == tmp_path / "xdg" / "pat-vllm" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_cache.cache_dir() == tmp_path / ".cache" / "pat-vllm"


@pytest.mark.parametrize("damage", ["", "{", "edited", "other key"])
def test_damaged_cache_is_reported_and_ignored(
    cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = profile_cache.keep(profile())
    assert path is not None
    if damage == "edited":
        path.write_text(path.read_text().replace("0.1", "0.2"))
    elif damage == "other key":
        profile({"ranks": 2}).save(path)
    else:
        path.write_text(damage)
    with caplog.at_level(logging.WARNING, logger="pat_vllm"):
        assert profile_cache.find(KEY) is None
    assert str(path) in caplog.text


def test_unwritable_cache_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAT_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="pat_vllm"):
        assert profile_cache.keep(profile()) is None
    assert "PAT_CACHE_DIR" in caplog.text


# ---------------------------------------------------------------- the unfinished file


def header(**key: Any) -> dict[str, Any]:
    values = profile().model_dump(exclude={"created", "steps", "switches", "note", "format"})
    return {**values, "key": {**KEY, **key}}


def test_unfinished_profile_goes_on(tmp_path: Path) -> None:
    from pat_vllm.cli.profile import Partial

    path = tmp_path / "p.json.part"
    points = POINTS.dump_python(
        [StepPoint(ONE, 1, 8, 1), StepPoint(TWO, 1, 8, 1), SwitchPoint(ONE, TWO, 0, 0)]
    )
    partial = Partial.open(path, header())
    assert partial.missing(points) == points
    partial.add(points[:1], {"steps": [step(ONE).model_dump()], "switches": []})
    partial.add(points[1:2], {"steps": [step(TWO).model_dump()], "switches": []})
    whole = path.read_text()
    path.write_text(whole + '{"points": [')  # stopped while writing

    again = Partial.open(path, header())
    assert path.read_text() == whole
    assert again.missing(points) == points[2:]
    assert again.steps == [step(ONE), step(TWO)]
    assert again.profile("").steps == profile().steps

    with pytest.raises(ProfileError, match="ranks is 4 now and 2 there"):
        Partial.open(path, header(ranks=4))
    path.write_text("no profile\n")
    with pytest.raises(ProfileError, match="--output"):
        Partial.open(path, header())


@pytest.mark.parametrize(
    ("pat", "said"),
    [
        ('{"layouts": [3]}', "tp=3"),
        ('{"layouts": "1,x"}', "layouts"),
        ('{"experts": "all"}', "experts"),
        ("[1, 2]", "--pat takes a JSON object"),
        ("", "--pat takes a JSON object"),
    ],
)
def test_command_refuses_options(pat: str, said: str) -> None:
    from typer.testing import CliRunner

    from pat_vllm.cli import app

    result = CliRunner().invoke(app, ["profile", "nowhere", "--pat", pat])
    assert result.exit_code == 2
    assert said in result.output


# ---------------------------------------------------------------- the key

RESOLVED = ResolvedKernels(("CPU_ATTN",), "materialized")


def _engine_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(random_model("qwen3")), enforce_eager=True, max_model_len=64
    ).create_engine_config()


def _key(monkeypatch: pytest.MonkeyPatch, change: str) -> dict[str, Any]:
    """The key of an engine, with `OWNER.FIELD=VALUE` or the variable `NAME=VALUE` changed.

    A value is JSON, or `not` for the opposite.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from pat_vllm.profiling.key import profile_key

    config, resolved = _engine_config(), RESOLVED
    name, _, value = change.partition("=")
    match name.split("."):
        case ["resolved", "attention"]:
            resolved = replace(resolved, attention=tuple(value.split(",")))
        case ["resolved", "weights"]:
            resolved = replace(resolved, weights="inplace")
        case ["attention_config", "backend"]:
            config.attention_config.backend = AttentionBackendEnum[value]
        case [owner, field]:
            part = getattr(config, owner)
            setattr(part, field, not getattr(part, field) if value == "not" else json.loads(value))
        case [variable] if variable:
            monkeypatch.setenv(variable, value)
    return profile_key(config, resolved)


@pytest.mark.parametrize(
    "change",
    [
        'kernel_config.linear_backend="triton"',
        'kernel_config.linear_backend_per_quant={"mxfp4": "triton"}',
        'kernel_config.moe_backend="triton"',
        "attention_config.backend=TRITON_ATTN",
        "attention_config.flash_attn_version=2",
        "resolved.attention=CPU_ATTN,TRITON_ATTN",
        "resolved.weights=inplace",
        'model_config.quantization="fp8"',
        "parallel_config.disable_custom_all_reduce=not",
        "VLLM_KV_CACHE_LAYOUT=HND",
        "VLLM_ROCM_USE_AITER=1",
        "VLLM_USE_FLASHINFER_SAMPLER=0",
        "VLLM_DISABLED_KERNELS=MarlinLinearKernel",
        "VLLM_BATCH_INVARIANT=1",
        "NCCL_P2P_DISABLE=1",
    ],
)
def test_key_tells_engines_with_other_kernels_apart(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    usual = _key(monkeypatch, "")
    other = _key(monkeypatch, change)
    assert other != usual
    with pytest.raises(ProfileError, match="another engine"):
        profile(usual).check(other, "p.json")
    assert json.loads(json.dumps(other)) == other


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_PORT",
        "VLLM_CACHE_ROOT",
        "VLLM_NCCL_SO_PATH",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
        "NCCL_SOCKET_IFNAME",
    ],
)
def test_key_has_no_paths_and_names(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    from pat_vllm.profiling.key import kernel_environment

    assert kernel_environment({variable: "here"}) == {}


# ---------------------------------------------------------------- a real engine

MODEL = "qwen3"


@pytest.fixture(scope="module")
def command_output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What `pat-vllm profile` wrote and printed, for an engine with the tests' options."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    options = {name: value for name, value in OPTIONS.items() if name != "seed"}
    options["enforce_eager"] = None
    flags = [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", value)
        if part is not None
    ]
    arguments = ["profile", random_model(MODEL), *flags, "--quick", "--output", path]
    done = subprocess.run(
        [sys.executable, "-c", "from pat_vllm.cli import app; app()", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return path, done.stdout


@pytest.fixture(scope="module")
def llm(command_output: tuple[Path, str]) -> Iterator[Any]:
    # One engine after the other: the command's has ended by now.
    with engine(MODEL, 2, {}) as llm:
        yield llm


def _jobs() -> dict[str, Job]:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, {}]
    return {
        f"job-{i}": Job(
            list(range(5, 40 + 7 * i)), {"max_tokens": 12, "ignore_eos": True, **kinds[i % 3]}
        )
        for i in range(9)
    }


def _known_requests(worker: Any) -> int:
    return sum(
        len(runtime.runner.requests) + runtime.runner.input_batch.num_reqs
        for runtime in worker._runtimes.values()
    )


@pytest.mark.slow
def test_profiling_leaves_no_trace(llm: Any) -> None:
    """Greedy, seeded and unseeded outputs are those of an engine that was not profiled."""
    executor = scheduler_of(llm).replica_set.executor
    before = run(llm, _jobs())

    (described,) = llm.collective_rpc("pat_profile", kwargs={"quick": True})
    points = described["points"]
    (answer,) = llm.collective_rpc("pat_profile", args=(points, True))

    assert executor.collective_rpc(_known_requests) == [0, 0]
    assert run(llm, _jobs()) == before

    made = Profile(
        **described["header"],
        created="now",
        steps=answer["steps"],
        switches=answer["switches"],
    )
    asked = POINTS.validate_python(points)
    assert len(made.steps) == sum(1 for point in asked if isinstance(point, StepPoint))
    for live in (0, 1, 8):
        for pair in ((ONE, TWO), (TWO, ONE)):
            assert any((s.source, s.target, s.num_seqs) == (*pair, live) for s in made.switches)
    assert all(s.kv_bytes == made.kv_bytes_per_token * s.num_seqs * 256 for s in made.switches), (
        "whole blocks of 32 tokens, 247 or so tokens each"
    )


@pytest.mark.slow
def test_used_up_budget_leaves_the_essential_points(llm: Any) -> None:
    from pat_vllm.profiling.header import engine_limits
    from pat_vllm.profiling.runner import profile_engine

    scheduler = scheduler_of(llm)
    config = llm.llm_engine.vllm_config
    plan = ProfilePlan.quick(engine_limits(config, scheduler.kv_cache_config), budget=1e-6)
    told: list[tuple[int, int, str]] = []
    scheduler.replica_set.drain()
    samples = profile_engine(
        scheduler.replica_set.executor,
        plan,
        scheduler.kv_cache_config,
        progress=lambda *what: told.append(what),
    )
    scheduler.reset_prefix_cache()
    assert len(samples.steps) == plan.essential
    assert samples.skipped == len(plan.points) - plan.essential
    assert {s.layout for s in samples.steps} == {ONE, TWO}
    assert [done for done, _, _ in told] == list(range(len(plan.points) + 1))
    assert {total for _, total, _ in told} == {len(plan.points)}


@pytest.mark.slow
def test_busy_engine_is_not_profiled(llm: Any) -> None:
    refused = []

    def ask(at: int) -> None:
        if at == 3:
            with pytest.raises(RuntimeError, match="idle"):
                llm.collective_rpc("pat_profile")
            refused.append(at)

    run(llm, _jobs(), ask)
    assert refused


@pytest.mark.slow
def test_load_or_measure(
    llm: Any,
    command_output: tuple[Path, str],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pat_vllm.profiling import load

    scheduler = scheduler_of(llm)
    measured: list[int] = []

    def measure(*args: Any, **kwargs: Any) -> Any:
        measured.append(1)
        return original(*args, **kwargs)

    original = load.profile_engine
    monkeypatch.setattr(load, "profile_engine", measure)

    def get(path: str | None = None) -> Profile:
        scheduler.replica_set.drain()
        return load.load_or_measure(scheduler.replica_set.executor, scheduler.kv_cache_config, path)

    first = get()
    scheduler.reset_prefix_cache()
    assert len(measured) == 1 and first.layouts == (ONE, TWO)
    assert get() == first and len(measured) == 1

    profile_cache.cache_path(first.key).write_text("{")
    again = get()
    scheduler.reset_prefix_cache()
    assert len(measured) == 2 and profile_cache.find(first.key) == again

    # The command's profile is of an engine in a process of its own, with the same flags.
    named, _ = command_output
    assert get(str(named)) == Profile.load(named) and len(measured) == 2
    other = tmp_path / "other.json"
    first.model_copy(update={"key": {**first.key, "max_num_seqs": 1}}).save(other)
    with pytest.raises(ProfileError, match=r"max_num_seqs is {'1': 16, '2': 32} here and 1"):
        get(str(other))
    other.write_text("{")
    with pytest.raises(ProfileError):
        get(str(other))

    assert str(random_model(MODEL)) not in json.dumps(first.key)
    assert json.loads(json.dumps(first.key)) == first.key


@pytest.mark.slow
def test_command_prints_and_saves(command_output: tuple[Path, str]) -> None:
    path, printed = command_output
    saved = Profile.load(path)
    assert not path.with_name(path.name + ".part").exists()
    assert "tp1dp2" in printed and "tp2dp1" in printed and path.name in printed
    assert {s.layout for s in saved.steps} == {ONE, TWO}
