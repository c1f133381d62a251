"""The benchmark's workloads with speculation: their tables, their files, and all with engines."""

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.bench.__main__ import app
from benchmarks.bench.judgement import Bar
from benchmarks.bench.run import BenchSettings
from benchmarks.bench.runs import PAT, Run
from benchmarks.bench.speculative import models
from benchmarks.bench.speculative.engines import (
    PAT_PLAIN,
    TABLE,
    SpeculativeRun,
    options_of,
    sides_of,
    static_name,
)
from benchmarks.bench.speculative.measure import Measured
from benchmarks.bench.speculative.models import REPEATING, SCATTERED
from benchmarks.bench.speculative.report import markdown, workload_content
from benchmarks.bench.speculative.tuning import Drafted, accepted_share, together, tuned_table
from benchmarks.bench.speculative.workloads import (
    ACCEPTED,
    DRAFT_LENGTHS,
    LONGEST,
    MOST_DRAFTS,
    PHRASE_TOKENS,
    SPECULATIVE,
    requests_with_phrase,
)
from pat_vllm.cli.results import to_json
from pat_vllm.config import PATConfig, PredictorPolicyConfig, StaticPolicyConfig
from pat_vllm.layout import Layout
from pat_vllm.reporting import DraftSample
from pat_vllm.speculation import draft_lengths
from tests.support.fork_server import context
from tests.support.mutation import mutated
from tests.test_bench import a_profile

ONE, TWO = Layout(1, 2), Layout(2, 1)
LAYOUTS = (ONE, TWO)
CONFIG = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, vocab_size=500)
TINY = dict(arch="qwen3", hidden=128, heads=8, kv_heads=4)


# ---------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", SPECULATIVE)
def test_workloads_are_long_tails_with_the_same_requests_for_all(name):
    workload = SPECULATIVE[name]
    batches = [workload.trace(repeat, seed=3) for repeat in range(40)]
    assert batches[1] == workload.trace(1, seed=3) != batches[2]
    lengths = [n for batch in batches for n in batch.lengths]
    assert max(lengths) == LONGEST == batches[0].max_tokens
    assert 4 < LONGEST / np.median(lengths) < 20
    trace = batches[1]
    requests = requests_with_phrase(trace, 500, 7, size=16)
    assert requests == requests_with_phrase(trace, 500, 7, size=16)
    for request, length in zip(requests, trace.lengths, strict=True):
        assert (len(request.prompt), request.length) == (48, length)
        phrase = request.prompt[-PHRASE_TOKENS:]
        assert all((b - a) % 16 == 1 for a, b in itertools.pairwise(phrase))
        assert {*phrase} == {*range(3, 19)}


def test_weights_change_before_every_second_batch():
    changing = SPECULATIVE["changing"]
    assert [changing.model(repeat) for repeat in range(6)] == [
        *[REPEATING] * 2,
        *[SCATTERED] * 2,
        *[REPEATING] * 2,
    ]
    assert {SPECULATIVE["unpredictable"].model(repeat) for repeat in range(6)} == {SCATTERED}
    assert [one.updates for one in SPECULATIVE.values()] == [False, False, True]


def test_each_token_of_a_scattered_phrase_is_as_likely_as_any_other(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    specs = {name: {**TINY, **{k: v for k, v in spec.items() if k in ("repeat", "phrase")}}
             for name, spec in models.SPECS.items()}  # fmt: skip
    monkeypatch.setattr(models, "SPECS", specs)
    path = models.model(SCATTERED, tmp_path)
    assert path == models.model(SCATTERED, tmp_path) != models.model(REPEATING, tmp_path)
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    rows = head[3 : 3 + 32]
    assert (rows == rows[0]).all() and (rows[:, 32:] == 0).all() and (rows[:, :32] > 0).all()
    assert len({tuple(row) for row in head[35:60].tolist()}) == 25


# ---------------------------------------------------------------- tables


@given(st.lists(st.integers(0, 4), min_size=1, max_size=50))
def test_what_drafts_give_is_counted(accepted):
    # Steps of one request that verified 4 drafts each.
    samples = [DraftSample(0.0, ONE, 0, 4, 1, 4, count) for count in accepted]
    gave = Drafted.of(4, sum(accepted) + len(accepted), samples)
    assert gave.steps == len(accepted)
    assert gave.share == pytest.approx(sum(accepted) / (4 * len(accepted)))
    twice = together([gave, gave, Drafted(1, 5, 1, 0)])
    assert (twice[4].steps, twice[4].share) == (2 * gave.steps, gave.share)
    assert accepted_share([gave, gave]) == pytest.approx(gave.share)


def a_model(free):
    """Steps in which `free` tokens cost no more than one does."""

    def seconds(layout, batch, context, longest, prefill=0, busy=1, drafts=0, k=0):
        return np.maximum(free, batch + drafts) / layout.tp + 0.0 * context + 1e-6 * (k > 0)

    return SimpleNamespace(seconds=seconds)


GAVE = [Drafted(0, 100, 0, 0), Drafted(1, 100, 66, 34), Drafted(4, 100, 160, 60)]


def check_tables(free, most):
    model = a_model(free)
    table = tuned_table(model, TWO, most, 50.0, GAVE)
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    assert table[-1][1] == most
    of = {batch: k for first, last, k in table for batch in range(first, last + 1)}
    for batch in range(1, most + 1):
        per_token = {
            one.length: model.seconds(
                TWO, batch, 0, 0, drafts=batch * one.drafted / one.steps, k=one.length
            )
            * one.steps
            / one.tokens
            for one in GAVE
        }
        assert per_token[of[batch]] == min(per_token.values())
    assert of[1] == 4, "while drafts are free"
    assert of[most] == 0, "when they cost more than they give"


def test_a_table_has_the_best_length_for_each_batch():
    check_tables(free=16, most=64)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"* (one.steps / one.tokens)": ""}, id="tokens do not count"),
        pytest.param(
            {"drafts=batch * (one.drafted / one.steps)": "drafts=0"}, id="drafts are free"
        ),
        pytest.param({"enumerate(lengths, 1)": "enumerate(lengths)"}, id="off by one"),
    ],
)
def test_wrong_tables_are_noticed(changes):
    with mutated(tuned_table, changes), pytest.raises(AssertionError):
        check_tables(free=16, most=64)


# ---------------------------------------------------------------- sides


def some_settings(name, repeats=3):
    return BenchSettings(Path(), 2, (SPECULATIVE[name],), repeats, "full", seed=0)


@pytest.mark.parametrize("name", SPECULATIVE)
def test_engines_differ_in_policy_and_table_only(name):
    settings_ = some_settings(name)
    tables = {ONE: [(1, 3, 4), (4, 32, 0)], TWO: [(1, 64, 0)]}
    found = options_of(settings_, SPECULATIVE[name], CONFIG, tables)
    assert {side.engine for side in sides_of(LAYOUTS)} == {*found}
    rest = []
    for engine, options in found.items():
        pat = PATConfig.parse(options.pop("additional_config")["pat"])
        drafter = dict(options.pop("speculative_config"))
        table = drafter.pop("num_speculative_tokens_per_batch_size", None)
        assert drafter.pop("num_speculative_tokens") == MOST_DRAFTS
        assert draft_lengths(MOST_DRAFTS, table) == DRAFT_LENGTHS
        # Weights that are to be updated must be plain, and so be all that is compared.
        assert pat.weights == ("inplace" if name == "changing" else "auto")
        if engine in (PAT, PAT_PLAIN):
            assert pat.policy == PredictorPolicyConfig(length_bound=LONGEST)
            assert table == (None if engine == PAT else [[1, 1, 0]])
        else:
            (layout,) = pat.resolve_layouts(2)
            assert str(layout) == engine
            assert pat.policy == StaticPolicyConfig(kind="static", tp=layout.tp)
            assert table == [[*one] for one in tables[layout]]
        rest.append((options, drafter))
    assert all(one == rest[0] for one in rest)
    # There is room for the drafts of the longest request.
    assert rest[0][0]["max_model_len"] == 48 + LONGEST + MOST_DRAFTS


def test_sides_are_all_layouts_with_all_lengths():
    names = [side.name for side in sides_of(LAYOUTS)]
    assert len({*names}) == len(names) == 2 * (len(DRAFT_LENGTHS) + 1) + 2
    assert {s.name: s.length for s in sides_of(LAYOUTS)}["tp2dp1, k = 0"] == 0
    assert {s.name: s.length for s in sides_of(LAYOUTS)}["tp2dp1, table"] is None


# ---------------------------------------------------------------- what is written

PACE = {static_name(ONE, 0): 1.0, static_name(TWO, 0): 1.1, static_name(ONE, 4): 0.9,
        static_name(TWO, TABLE): 0.8, PAT_PLAIN: 0.95, PAT: 0.76}  # fmt: skip


def measured_of(name, pace):
    """Made-up runs: a side takes as long as `pace` says, in units of the repeat's."""
    settings_, workload = some_settings(name), SPECULATIVE[name]
    runs = []
    for repeat in range(settings_.repeats + 1):
        for side in sides_of(LAYOUTS):
            drafts = (side.length or 0) * 10
            seconds = pace.get(side.name, 1.2) * (1 + repeat)
            runs.append(
                SpeculativeRun(
                    Run(side.name, name, repeat, 100.0, seconds, 500, 0.5 * seconds, True),
                    workload.model(repeat),
                    (DraftSample(100.5, ONE, 0, side.length or 0, 20, drafts, drafts // 2),),
                    Drafted(side.length or 0, 500, drafts, drafts // 2),
                )
            )
    gave = {model: (Drafted(1, 100, 60, 30),) for model in workload.models}
    tables = {ONE: [(1, 32, 1)], TWO: [(1, 64, 0)]}
    return settings_, Measured(workload, tuple(runs), gave, tables, a_profile(), {PAT: 9.0})


@pytest.mark.parametrize(
    ("name", "accepted", "fits"),
    [
        *(("repeating", share, 0.3 <= share <= 0.7) for share in (0.29, 0.3, 0.7, 0.71)),
        *(("unpredictable", share, share <= 0.05) for share in (0.0, 0.05, 0.06)),
        *(("changing", share, False) for share in (0.04, 0.5)),
        # Where hardly any may be accepted, there may be none.
        *((name, None, name == "unpredictable") for name in SPECULATIVE),
    ],
)
def test_other_acceptance_than_a_workload_says_is_an_error(name, accepted, fits):
    _, measured = measured_of(name, {})
    drafted = 0 if accepted is None else 100
    runs = [
        dataclasses.replace(run, gave=Drafted(4, 200, drafted, round(drafted * (accepted or 0))))
        for run in measured.runs
    ]
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="were accepted"):
        dataclasses.replace(measured, runs=runs).check_accepted()


def content_of(name, pace=PACE):
    settings_, measured = measured_of(name, pace)
    facts = {
        **dict(date="2026-01-02T03:04:05", command="python -m benchmarks.bench", commit="abc"),
        **dict(cpu="a CPU", cores=2, memory_gib=8.0, vllm="0.32.0", torch="2.0"),
    }
    return {
        "machine": facts,
        "settings": {"ranks": 2, "repeats": settings_.repeats, "scale": "full"},
        "workloads": [workload_content(settings_, measured)],
    }


def test_gains_are_in_rows_of_their_own():
    content = content_of("repeating")
    (one,) = content["workloads"]
    assert (one["best_plain"], one["best_fixed"], one["best_table"]) == (
        "tp1dp2, k = 0",
        "tp1dp2, k = 4",
        "tp2dp1, table",
    )
    found = {name: ratio["mean"] for name, ratio in one["ratios"].items()}
    assert found == pytest.approx(
        {"layout": 0.95, "k": 0.76 / 0.95, "both": 0.76, "fixed": 0.76 / 0.9, "table": 0.95}
    )
    assert one["accepted"] == {REPEATING: 0.5} and one["seconds"][PAT]["repeats"] == 3
    text = markdown(content)
    assert text == markdown(json.loads(to_json(content)))
    assert "| layout alone: PAT, k = 0 / best static, k = 0 | 0.95 (0.95-0.95) |" in text
    assert "| k alone: PAT / PAT, k = 0 | 0.80 (0.80-0.80) |" in text


@pytest.mark.parametrize(
    ("name", "pace", "verdicts"),
    [
        ("repeating", 0.75, ["met", "met"]),
        ("repeating", 0.9, ["met", "missed"]),
        ("repeating", 1.0, ["missed", "missed"]),
        ("unpredictable", 0.9, ["met", "met"]),
        ("unpredictable", 0.98, ["missed", "missed"]),
        ("changing", 0.94, ["met"]),
        ("changing", 0.96, ["missed"]),
    ],
)
def test_bars(name, pace, verdicts):
    (one,) = content_of(name, {**PACE, PAT: pace})["workloads"]
    assert [bar["verdict"] for bar in one["bars"]] == verdicts


def test_a_bar_is_met_by_what_it_says_at_most():
    assert [Bar("x", 1.0, value).verdict for value in (1.0, 1.01)] == ["met", "missed"]


@settings(deadline=None, max_examples=10)
@given(st.floats(0.5, 2.0))
def test_ratios_are_those_of_equal_batches(pace):
    (one,) = content_of("repeating", {**PACE, PAT: pace})["workloads"]
    ratio = one["ratios"]["k"]
    assert ratio["low"] == pytest.approx(ratio["high"]) == pytest.approx(pace / 0.95)


def test_a_model_is_refused_for_workloads_that_have_their_own(tmp_path):
    result = CliRunner().invoke(app, ["--workloads", "repeating", "--model", str(tmp_path)])
    assert result.exit_code == 2 and "a model of its own" in " ".join(result.output.split())


# ---------------------------------------------------------------- real engines


@pytest.mark.slow
@pytest.mark.nightly
def test_the_workloads_run_on_real_engines(tmp_path, monkeypatch):
    """With tiny models, whose weights are replaced on the way."""
    made_by = SimpleNamespace(get_context=lambda method: context())
    monkeypatch.setattr("benchmarks.engine_process.multiprocessing", made_by)
    monkeypatch.setattr("benchmarks.bench.speculative.engines._SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(
        models, "SPECS", {name: {**TINY, "repeat": 1.5, "phrase": 16} for name in models.SPECS}
    )
    # So few tokens tell little of what is accepted.
    monkeypatch.setattr(
        "benchmarks.bench.speculative.measure.ACCEPTED", dict.fromkeys(ACCEPTED, (0.0, 1.0))
    )
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["--workloads", "changing", "--scale", "tiny", "--repeats", "2"]
    arguments += ["--models-dir", str(tmp_path / "models"), "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*-bench-speculation.json")
    content = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == markdown(content)
    (one,) = content["workloads"]
    assert len(one["runs"]) == 3 * len(sides_of(LAYOUTS))
    traces = [SPECULATIVE["changing"].trace(repeat, 0.125) for repeat in range(3)]
    for run in one["runs"]:
        assert run["tokens"] == sum(traces[run["repeat"]].lengths)
        assert run["model"] == (SCATTERED if run["repeat"] == 2 else REPEATING)
        assert not run["drafted"] or "k = 0" not in run["side"]
    # Weights did change: what follows a scattered token cannot be guessed.
    accepted = dict.fromkeys((REPEATING, SCATTERED), 0)
    for run in one["runs"]:
        accepted[run["model"]] += run["accepted"]
    assert accepted[SCATTERED] < 10 < accepted[REPEATING]
    assert {*one["tables"]} == {"tp1dp2", "tp2dp1"}
    assert str(tmp_path) not in path.read_text()
