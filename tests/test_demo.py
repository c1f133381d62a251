"""The demo: its batch, what it makes of recorded runs, and all of it with real engines."""

import dataclasses
import json
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pat_vllm.cli import app
from pat_vllm.cli.demo import (
    Contender,
    contenders,
    disagreement,
    drafts_of,
    make_batch,
    response_lengths,
    run_spec,
    table_rows,
    verdict,
)
from pat_vllm.cli.demo_plot import plot
from pat_vllm.cli.demo_timeline import draw_timeline
from pat_vllm.cli.engine_run import RunFailed, RunResult, environment, run
from pat_vllm.config import PATConfig, SchedulePolicyConfig, StaticPolicyConfig
from pat_vllm.layout import Layout
from pat_vllm.mixture import Mixture
from pat_vllm.reporting import DraftSample, LiveSample, Report, SwitchReport
from tests.support.fork_server import Program

from .models import random_model

ONE, TWO = Layout(1, 2), Layout(2, 1)
BEGAN = 100.0
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def a_switch(at, reason="policy", source=ONE, target=TWO, live=2):
    times: Any = [0.25, *[0.0] * 8]
    return SwitchReport(at, source, target, reason, live, live, 0, 5_000_000, *times)


def a_result(seconds, timeline, switches=(), outputs=((5, 6), (7, 8, 9, 10))):
    samples = tuple(LiveSample(BEGAN + at, layout, live) for at, layout, live in timeline)
    switches = tuple(dataclasses.replace(s, at=BEGAN + s.at) for s in switches)
    report = Report(ONE, (ONE, TWO), switches, (), samples, {})
    return RunResult(20.0, BEGAN, seconds, outputs, report)


def results():
    """Three runs as they would be recorded: JSON there and back."""
    warm_up = [(-2.0, ONE, 8), (-1.0, TWO, 3), (-0.5, TWO, 0)]
    recorded = (
        a_result(12.0, [(-2.0, ONE, 8), (0.0, ONE, 8), (6.0, ONE, 2), (8.0, ONE, 1), (12, ONE, 0)]),
        a_result(10.0, [(-2.0, TWO, 8), (0.0, TWO, 8), (7.0, TWO, 2), (8.0, TWO, 1), (10, TWO, 0)]),
        a_result(
            8.0,
            [*warm_up, (0.0, ONE, 8), (4.0, ONE, 2), (4.5, TWO, 2), (6.0, TWO, 1), (8.1, TWO, 0)],
            [
                a_switch(-1.5),
                a_switch(-0.4, "idle", TWO, ONE),
                a_switch(4.0),
                a_switch(7.99, "idle", TWO, ONE),
            ],
        ),
    )
    return list(
        zip(
            contenders(2, switch_at=2),
            (RunResult.from_json(result.to_json()) for result in recorded),
            strict=True,
        )
    )


# ---------------------------------------------------------------- the batch


def test_lengths_are_heavy_tailed_and_repeatable():
    lengths = response_lengths(200, 400, seed=3)
    assert lengths == response_lengths(200, 400, seed=3)
    assert lengths != response_lengths(200, 400, seed=4)
    ordered = sorted(lengths)
    assert ordered[0] >= 4 and ordered[-1] == 400
    # Half of the requests are short, and a few run alone for long.
    assert ordered[100] < 400 / 8
    assert 2 <= sum(length > 400 / 3 for length in lengths) <= 30


def test_batches_repeat_and_stay_in_the_vocabulary():
    batch = make_batch((4, 9), vocab=300, temperature=1.0, seed=5)
    assert batch == make_batch((4, 9), vocab=300, temperature=1.0, seed=5)
    assert batch.prompts != make_batch((4, 9), vocab=300, temperature=1.0, seed=6).prompts
    assert all(3 <= token < 300 for prompt in batch.prompts for token in prompt)
    assert batch.tokens == 13
    assert batch.longest == max(len(batch.prompts[0]) + 4, len(batch.prompts[1]) + 9)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_contenders_are_valid_options(ranks):
    replicas, group, switching = (
        PATConfig.parse(contender.options) for contender in contenders(ranks, switch_at=4)
    )
    for config in (replicas, group, switching):
        config.resolve_layouts(ranks)
    assert replicas.policy == StaticPolicyConfig(kind="static", tp=1)
    assert group.policy == StaticPolicyConfig(kind="static", tp=ranks)
    assert isinstance(switching.policy, SchedulePolicyConfig)
    assert switching.policy.switch_at[4] == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_contenders_of_a_mixture_switch_between_both_kinds(ranks):
    mixture = Mixture(num_experts=16, intermediate=256)
    configs = [PATConfig.parse(one.options) for one in contenders(ranks, 16, mixture)]
    assert {config.weights for config in configs} == {"inplace"}
    _, group, switching = (config.policy for config in configs)
    assert group == StaticPolicyConfig(kind="static", tp=ranks)
    assert isinstance(switching, SchedulePolicyConfig)
    layouts = configs[2].resolve_layouts(ranks, mixture)
    entered = [Layout.find(name, layouts) for _, name in sorted(switching.switch_at.items())]
    assert entered == [*sorted(layouts[1:], key=lambda one: (-one.tp, one.experts == "ep"))]


def test_contenders_differ_in_nothing_but_the_policy(tmp_path):
    config = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = make_batch((4, 9), vocab=300, temperature=1.0, seed=5)
    specs = [run_spec(tmp_path, 2, c, batch, batch) for c in contenders(2, switch_at=2)]
    policies = [spec.engine["additional_config"]["pat"].pop("policy") for spec in specs]
    assert len({json.dumps(policy, sort_keys=True) for policy in policies}) == 3
    assert specs[0] == specs[1] == specs[2]
    assert "speculative_config" not in specs[0].engine


def test_all_contenders_speculate_alike(tmp_path):
    config = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = make_batch((4, 9), vocab=300, temperature=0.0, seed=5)
    specs = [run_spec(tmp_path, 2, c, batch, batch, 3) for c in contenders(2, switch_at=2)]
    configs = [spec.engine["speculative_config"] for spec in specs]
    assert configs[0] == configs[1] == configs[2]
    assert (configs[0]["method"], configs[0]["num_speculative_tokens"]) == ("ngram", 3)


def test_too_long_a_batch_is_refused(tmp_path):
    config = dict(
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_size=64,
        vocab_size=300,
        max_position_embeddings=64,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = make_batch((4, 90), vocab=300, temperature=1.0, seed=5)
    with pytest.raises(ValueError, match="--max-tokens 32 or less"):
        run_spec(tmp_path, 2, contenders(2, 2)[0], batch, batch)


def test_environment_binds_ranks_and_respects_the_user():
    assert environment(1, {})["VLLM_CPU_OMP_THREADS_BIND"].isdigit()
    crowded = environment(100_000, {})
    assert crowded["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert crowded["OMP_NUM_THREADS"] == "1"
    mine = environment(2, {"VLLM_CPU_OMP_THREADS_BIND": "4|5", "VLLM_CPU_KVCACHE_SPACE": "1"})
    assert mine["VLLM_CPU_OMP_THREADS_BIND"] == "4|5"
    assert "VLLM_CPU_KVCACHE_SPACE" not in mine


# ---------------------------------------------------------------- what is shown


def test_a_result_is_cut_to_its_batch():
    _, result = results()[2]
    assert [s.at - BEGAN for s in result.switches] == [4.0]
    assert result.live == ((0.0, 8), (4.0, 2), (4.5, 2), (6.0, 1), (8.0, 0))
    assert result.spans == ((ONE, 0.0, 4.0), (TWO, 4.0, 8.0))
    _, static = results()[1]
    assert static.spans == ((TWO, 0.0, 10.0),)


def test_table_rows():
    assert table_rows(results()) == [
        ("replicas", "tp1dp2", "12.00", "0", "1.20", "0", "-"),
        ("one group", "tp2dp1", "10.00", "1", "1.00", "0", "-"),
        ("live switch", "tp1dp2, tp2dp1 at 2", "8.00", "1", "0.80", "1", "250"),
    ]


def test_verdict_says_when_the_switch_loses():
    replicas, group, (contender, switching) = results()
    assert "20.0% less" in verdict([replicas, group, (contender, switching)])
    slow = dataclasses.replace(switching, seconds=11.0)
    loses = verdict([replicas, group, (contender, slow)])
    assert "10.0% more" in loses and "did not pay" in loses
    assert "did not happen" in verdict([replicas, group, (contender, group[1])])


def test_timeline():
    *_, (_, result) = results()
    lines = draw_timeline(result, width=16)
    assert lines[:4] == [
        "     8 |::::::::",
        "     4 |::::::::",
        "     2 |::::::::####",
        "     1 |::::::::########",
    ]
    assert lines[5].split() == ["0", "s", "8.0", "s"]
    assert lines[6].split()[0] == ":::" and "layout tp1dp2: 2 replicas of tp=1" in lines[6]
    assert "switch tp1dp2 -> tp2dp1 at 4.00 s: 2 live" in lines[-1]
    assert "5.0 MB" in lines[-1] and "250 ms" in lines[-1]


def test_timeline_of_an_odd_number_of_requests():
    result = a_result(4.0, [(0.0, ONE, 5), (2.0, ONE, 1)])
    lines = draw_timeline(result, width=4)
    assert lines[:4] == ["     5 |::", "     4 |::", "     2 |::", "     1 |::::"]


def test_agreement():
    first, second, (contender, result) = results()
    assert disagreement([first, second, (contender, result)]) is None

    other = dataclasses.replace(result, outputs=((5, 6), (7, 8, 1, 2)))
    message = disagreement([first, second, (contender, other)])
    assert message is not None
    assert "'replicas' and 'live switch' differ in 1 of 2 requests" in message
    assert "request 1 differs first at token 2: 9 and 1" in message

    short = dataclasses.replace(result, outputs=((5,), (7, 8, 9, 10)))
    assert "has 2 and 1 tokens" in (disagreement([first, (contender, short)]) or "")


def with_drafts(result):
    """A run of `results` that speculated: 7 of 10 draft tokens were accepted in its batch."""
    drafts = (
        DraftSample(BEGAN - 1.0, ONE, 0, 4, 5, 90, 1),  # in the warm-up
        DraftSample(BEGAN + 1.0, ONE, 0, 4, 3, 8, 6),
        DraftSample(BEGAN + 2.0, TWO, 0, 4, 3, 2, 1),
    )
    return dataclasses.replace(result, report=dataclasses.replace(result.report, drafts=drafts))


def test_drafts_of_a_batch():
    result = with_drafts(results()[2][1])
    assert (result.drafted, result.acceptance) == (10, 0.7)
    replicas, group, (contender, _) = results()
    assert drafts_of([replicas, group, (contender, result)]) == (
        "n-gram drafts, k = 4: accepted in 'replicas' 0% of 0, 'one group' 0% of 0, "
        "'live switch' 70% of 10 tokens."
    )


@pytest.mark.parametrize("speculate", [False, True])
def test_plot_is_an_image(tmp_path, speculate):
    path = tmp_path / "demo.png"
    runs = [(c.label, with_drafts(one) if speculate else one) for c, one in results()]
    plot(runs, path)
    assert path.read_bytes().startswith(PNG_SIGNATURE)


# ---------------------------------------------------------------- the command


def demo_command(tmp_path, model, *options):
    output = tmp_path / "out.png"
    arguments = ["demo", "--model", str(model), "--output", str(output), *options]
    outcome = CliRunner().invoke(app, arguments)
    return outcome.exit_code, " ".join(outcome.output.replace("│", " ").split()), output


def test_different_outputs_fail_the_demo(tmp_path, monkeypatch):
    config = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(config))
    recorded = [result for _, result in results()]
    recorded[2] = dataclasses.replace(recorded[2], outputs=((5, 6), (7, 8, 9, 11)))
    answers = iter(recorded)
    monkeypatch.setattr("pat_vllm.cli.demo.run", lambda spec: next(answers))
    code, text, image = demo_command(tmp_path, tmp_path, "--requests", "2", "--switch-at", "2")
    assert code == 1
    assert "DIFFERENT OUTPUTS" in text
    assert "request 1 differs first at token 3: 10 and 11" in text
    assert "agree" not in text
    assert image.exists()


def test_a_directory_without_a_model_is_refused(tmp_path):
    code, text, _ = demo_command(tmp_path, tmp_path / "nowhere")
    assert code == 2
    assert "is no directory with a checkpoint" in text


def test_sampling_does_not_go_with_drafts(tmp_path):
    code, text, _ = demo_command(tmp_path, "repeating", "--speculate", "--temperature", "1")
    assert code == 2
    assert "--temperature 1 does not go with --speculate" in text


@pytest.mark.slow
@pytest.mark.nightly
def test_a_failed_engine_shows_its_last_words():
    batch = make_batch((4,), vocab=300, temperature=0.0, seed=0)
    contender = Contender("broken", "tp3dp1", {"layouts": [3]})
    spec = run_spec(random_model("qwen3"), 2, contender, batch, batch)
    with pytest.raises(RunFailed, match="layouts names tp=3"):
        run(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "from_server"),
    [
        pytest.param("qwen3", (), True, id="sooner than for users"),
        pytest.param("qwen3", (), False, id="as for users", marks=pytest.mark.nightly),
        pytest.param("repeating", ("--speculate",), True, id="drafts", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", (), True, id="experts", marks=pytest.mark.nightly),
    ],
)
def test_demo_end_to_end(model, options, from_server, tmp_path, monkeypatch):
    if from_server:
        started_by = SimpleNamespace(Popen=Program, STDOUT=None)
        monkeypatch.setattr("pat_vllm.cli.engine_run.subprocess", started_by)
    # As a user has it, rather than as conftest.py sets it: a core for each rank.
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    code, text, image = demo_command(
        tmp_path,
        random_model(model),
        *("--requests", "10", "--max-tokens", "60", "--switch-at", "3", *options),
    )
    assert code == 0, text
    assert "Outputs of all three runs agree" in text
    entered = ["tp2dp1ep", "tp2dp1"] if model == "qwen3_moe" else ["tp2dp1"]
    for source, target in pairwise(["tp1dp2", *entered]):
        assert f"switch {source} -> {target}" in text
    shares = [int(one) for one in re.findall(r"' (\d+)% of \d+", text)]
    assert len(shares) == (3 if options else 0)
    assert all(20 < share < 90 for share in shares), text
    content = image.read_bytes()
    assert content.startswith(PNG_SIGNATURE) and len(content) > 10_000
