"""`pat-vllm advise`: files of lengths, the verdict where the answer is known, errors, output."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pat_vllm.advice.lengths import read_rollouts
from pat_vllm.advice.settings import pat_options, settings
from pat_vllm.advice.sides import Side, Task
from pat_vllm.advice.text import percents, rows, verdict
from pat_vllm.advice.verdict import OWN_WORK, Advice, Gain
from pat_vllm.cli import app
from pat_vllm.cli.advise import Question, answer, run_advise
from pat_vllm.config import PATConfig
from pat_vllm.predictor import kept
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.hardware import measured_noise, named_profile
from tests.support.mutation import mutated

# ---------------------------------------------------------------- files of lengths


def words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


VERL = (
    '{"input": "what is it", "output": "a b c", "gts": "c", "score": 1, "step": 7, "uid": "0_0"}\n'
    '{"input": "what is it", "output": "", "gts": "c", "score": 0, "step": 7, "uid": "0_1"}\n'
)
"""As `trainer.rollout_data_dir` has it."""


@pytest.mark.parametrize(
    ("name", "text", "lengths", "prompts"),
    [
        ("array.json", "[120, 4000, 7]", (120, 4000, 7), ()),
        ("floats.json", "[120.0, 7]", (120, 7), ()),
        ("lines.txt", "length\n120\n# old\n4000\n", (120, 4000), ()),
        ("lines.json", "120\n4000\n", (120, 4000), ()),
        ("trace.json", '{"lengths": [3, 9], "num_prompt_tokens": [5, 6]}', (3, 9), (5, 6)),
        ("trace.json", '{"lengths": [3, 9], "max_tokens": 16}', (3, 9), ()),
        ("one.jsonl", '{"response_length": 12}\n\n{"response_length": 9}\n', (12, 9), ()),
        ("single.jsonl", '{"response_length": 12}', (12,), ()),
        (
            "openrlhf.jsonl",
            '{"response_length": [12, 9], "total_length": [20, 17], "reward": [0, 1]}\n'
            '{"response_length": [3.0], "total_length": [11.0], "reward": [0]}\n',
            (12, 9, 3),
            (8, 8, 8),
        ),
        ("prompts.jsonl", '{"response_length": 12, "prompt_length": 4}\n', (12,), (4,)),
        ("7.jsonl", VERL, (3, 1), (3, 3)),
        ("records.json", '[{"output": "a b"}]', (2,), ()),
    ],
)
def test_every_format_is_read(
    tmp_path: Path, name: str, text: str, lengths: tuple[int, ...], prompts: tuple[int, ...]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    found = read_rollouts(file, words)
    assert (found.lengths, found.num_prompt_tokens) == (lengths, prompts)
    assert found.counted == ("output" in text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", "empty array"),
        ("a.json", "", "is empty"),
        ("a.json", "[3, -1]", "entry 2: a length must be a whole number .* got -1"),
        ("a.json", "[3, 0]", "got 0; leave out responses that were aborted"),
        ("a.json", "[3, 2.5]", "got 2.5"),
        ("a.json", "[3, true]", "got True"),
        ("a.json", "[3, NaN]", "got nan"),
        ("a.json", '["3"]', "got '3'"),
        ("a.json", "[3, 4", "line 1 is no JSON .* expected a JSON array"),
        ("a.txt", "12\ntwelve\n", "line 2 must be one length in tokens, got 'twelve'"),
        ("a.txt", "12\n-3\n", "lengths of trace 'a' must be 1 to"),
        ("a.jsonl", '{"response_length": 3}\n{"response', "line 2 is no JSON"),
        (
            "a.jsonl",
            '{"tokens": 3, "id": 1}\n',
            "line 1 has 'tokens', 'id'; expected .*response_length",
        ),
        ("a.jsonl", '{"response_length": "3"}\n', "line 1: response_length must be .* got '3'"),
        ("a.jsonl", '{"response_length": [3], "total_length": [3]}', "must exceed response_length"),
        ("a.jsonl", '{"output": "a"}\n{"output": 3}\n', "line 2 has 'output'; expected"),
        ("a.json", '{"lengths": ["a"]}', "lengths must be a list of whole numbers"),
    ],
)
def test_what_is_no_file_of_lengths_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_rollouts(file, words)
    assert str(file) in str(error.value)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "7.jsonl"
    file.write_text(VERL)
    with pytest.raises(ValueError, match=r"holds text .* --model DIRECTORY"):
        read_rollouts(file)


def test_bytes_and_missing_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.parquet"
    file.write_bytes(b"PAR1\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no text file; expected a JSON array"):
        read_rollouts(file)
    with pytest.raises(OSError):
        read_rollouts(tmp_path / "missing.json")


def test_a_directory_of_verl_is_read_by_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \*\.jsonl file"):
        read_rollouts(tmp_path)
    for step in (10, 2):
        text = json.dumps({"input": "x", "output": " ".join("w" * step), "step": step})
        (tmp_path / f"{step}.jsonl").write_text(text)
    assert read_rollouts(tmp_path, words).lengths == (2, 10)


def test_what_an_engine_has_learnt_is_read(tmp_path: Path) -> None:
    model = LengthModel(4096)
    file = tmp_path / "lengths.json"
    kept.save(file, model)
    with pytest.raises(ValueError, match="has seen no response"):
        read_rollouts(file)
    seen = np.exp(np.random.default_rng(0).normal(6, 0.7, 3000)).clip(1, 4000).astype(int)
    for length in seen.tolist():
        model.finished(length, complete=True)
    model.end_of_batch()
    kept.save(file, model)
    expected = read_rollouts(file).lengths
    quantiles = [0.1, 0.5, 0.9, 0.99]
    assert np.quantile(expected, quantiles) == pytest.approx(np.quantile(seen, quantiles), rel=0.1)
    file.write_text('{"ends": [1], "tokens": "x"}')
    with pytest.raises(ValueError, match="holds no length history"):
        read_rollouts(file)


def test_batches_are_drawn_from_what_was_seen(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    pairs = {10: 3, 500: 4, 9000: 5}
    file.write_text(
        "".join(f'{{"response_length": {a}, "prompt_length": {b}}}\n' for a, b in pairs.items())
    )
    batch = read_rollouts(file).draw(200, 1000, seed=1)
    assert len(batch) == 200 and set(batch.lengths) == {10, 500, 1000}  # cut short
    prompts = {1000 if length > 1000 else length: tokens for length, tokens in pairs.items()}
    assert batch.num_prompt_tokens == tuple(prompts[length] for length in batch.lengths)
    assert batch.lengths != read_rollouts(file).draw(200, 1000, seed=2).lengths


# ---------------------------------------------------------------- the verdict

SMALL = Question("llama-3.1-8b", "A40", 2, responses=32, max_tokens=256, iterations=2)


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    file = tmp_path_factory.mktemp("lengths") / "equal.txt"
    file.write_text("400\n" * 64)
    return answer(Question("llama-3.1-8b", "A40", 4, responses=64, lengths=file, iterations=4))


@pytest.fixture(scope="module")
def tail() -> Advice:
    """Nearly all responses end early, one is 16 times as long; NVLink."""
    of = {"max_tokens": 2048, "shape": "straggler", "iterations": 4}
    return answer(Question("llama-3.1-8b", "H100", 4, responses=1024, **of))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def accepted() -> Advice:
    of = {"responses": 64, "max_tokens": 512, "shape": "log-normal", "iterations": 4}
    return answer(replace(SMALL, gpus=4, acceptance=0.8, **of))  # type: ignore[arg-type]


def check_nothing(advice: Advice) -> None:
    assert not advice.pays and "Nothing to gain here" in verdict(advice)


def test_equal_lengths_gain_nothing(equal: Advice) -> None:
    check_nothing(equal)
    assert "the interval reaches 0" in verdict(equal)


def test_luck_is_no_gain(equal: Advice) -> None:
    ours, static = [0.9, 1.04, 0.95, 1.0], [1.0] * 4
    check_nothing(replace(equal, gain=Gain.of(ours, static)))
    with mutated(Gain.of, {"mean + half, mean - half": "mean, mean"}):
        without_interval = Gain.of(ours, static)
    with pytest.raises(AssertionError):
        check_nothing(replace(equal, gain=without_interval))


def test_a_long_tail_on_fast_links_gains(tail: Advice) -> None:
    assert tail.pays and "Nothing" not in verdict(tail)
    assert 0.05 < tail.gain.low < tail.gain.mean < tail.gain.high < 0.3
    by_name = {source.name: source.gain for source in tail.sources}
    assert set(by_name) == {"concurrency", "layout"}  # no drafts are accepted
    # Without drafts, all that is gained at equal concurrency is the layouts'.
    assert by_name["layout"] == tail.gain and not tail.drafts
    assert "tp4dp1" in tail.path


def test_drafts_that_are_accepted_are_advised(accepted: Advice) -> None:
    assert accepted.drafts and accepted.ours is accepted.sides.pat
    by_name = {source.name: source.gain for source in accepted.sources}
    assert by_name["draft length"].low > 0.2
    assert accepted.sides.static.side.drafts != "k = 0"
    assert accepted.sides.static.result.seconds <= accepted.sides.plain.result.seconds


def test_parts_multiply_to_the_whole(accepted: Advice) -> None:
    left = 1.0
    for source in accepted.sources:
        left *= 1 - source.gain.mean
    whole = Gain.of(accepted.sides.pat.seconds, accepted.sides.own.seconds)
    assert left == pytest.approx(1 - whole.mean)


def test_the_best_static_side_is_the_fastest_that_was_replayed(tail: Advice) -> None:
    rollouts, static = tail.rollouts, tail.sides.static
    for layout in rollouts.profile.layouts:
        chains = range(len(rollouts.chains))
        runs = [run for i in chains for run in rollouts.replay(Task(Side(layout), i))]
        assert static.result.seconds <= sum(run.seconds for run in runs)
        if layout == static.side.layout:
            assert static.seconds == tuple(run.seconds for run in runs)


def test_own_limits_are_those_of_one_replica_in_every_layout(tail: Advice) -> None:
    rollouts = tail.rollouts
    assert rollouts.profile.max_num_seqs == {1: 256, 2: 512, 4: 1024}
    assert rollouts.with_own_limits.max_num_seqs == {1: 256, 2: 256, 4: 256}
    # 1,024 responses do not fit into one group of 256 at once.
    assert tail.sides.own.result.seconds >= tail.sides.plain.result.seconds


def test_gain_and_its_interval() -> None:
    same = Gain.of([2.0, 3.0], [2.0, 3.0])
    assert (same.mean, same.low, same.high, same.reaches) == (0, 0, 0, 0)
    half = Gain.of([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert half.mean == half.low == half.high == pytest.approx(0.5) and half.reaches is None
    spread = Gain.of([0.8, 1.0], [1.0, 1.0])
    assert spread.low < 0 < spread.mean < spread.high and spread.reaches == 0
    assert (spread.least, spread.most) == (0, pytest.approx(0.2))
    little = Gain.of([0.997, 0.997], [1.0, 1.0])
    assert little.low > 0 and little.reaches == OWN_WORK
    assert percents(Gain(0.1234, -0.0001, 0.2, 0.1, 0.3)) == [
        "12.3%",
        "0.0%",
        "20.0%",
        "10.0%",
        "30.0%",
    ]


def test_a_measured_profile_is_not_called_modelled(tmp_path: Path) -> None:
    profile = measured_noise()
    profile.save(tmp_path / "mine.json")
    question = Question(profile=tmp_path / "mine.json", responses=32, max_tokens=64, iterations=2)
    text = io.StringIO()
    advice = run_advise(Console(file=text, width=200), question, processes=1)
    assert "modelled" not in text.getvalue() and "seconds, simulated" in text.getvalue()
    assert "'MODEL'" in text.getvalue()
    if advice.pays:
        assert str(tmp_path / "mine.json") in text.getvalue()
    assert not advice.modelled and "modelled" not in verdict(advice)
    assert advice.to_json()["step_and_switch_times"] == "measured"


# ---------------------------------------------------------------- settings


def test_settings_with_pat_are_what_pat_reads(accepted: Advice, tail: Advice) -> None:
    forms = settings(tail, "MODEL", 256)
    call = ast.parse(forms["LLM"]).body[0].value  # type: ignore[attr-defined]
    given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    config = PATConfig.parse(given["additional_config"]["pat"])
    assert config.resolve_layouts(given["tensor_parallel_size"]) == tail.rollouts.profile.layouts
    assert given["distributed_executor_backend"] == "pat" and given["max_num_seqs"] == 256
    assert "speculative_config" not in given
    serve = shlex.split(forms["vllm serve"].replace("\\\n", " "))
    assert json.loads(serve[serve.index("--additional-config") + 1]) == given["additional_config"]
    openrlhf = shlex.split(forms["OpenRLHF"].replace("\\\n", " "))
    assert (
        json.loads(openrlhf[openrlhf.index("--vllm.pat") + 1]) == given["additional_config"]["pat"]
    )
    assert "actor_rollout_ref.rollout.name=pat" in forms["VeRL"]
    assert "policy='{kind:predictor,lengths_file:/PATH/lengths.json}'" in forms["VeRL"]


def test_settings_with_drafts(accepted: Advice) -> None:
    sure = replace(accepted, gain=Gain(0.1, 0.1, 0.1, 0.1, 0.1))
    for name, text in settings(sure, "MODEL", 256).items():
        assert "ngram" in text, name
    assert '"num_speculative_tokens": 7' in settings(sure, "MODEL")["LLM"]


def test_settings_without_pat_name_the_static_layout(equal: Advice, accepted: Advice) -> None:
    layout = equal.sides.static.side.layout
    assert layout is not None
    for name, text in settings(equal, "MODEL", 256).items():
        assert "pat" not in text.lower().replace("/path", ""), name
        assert str(layout.tp) in text
    plain = replace(accepted, gain=Gain(0, 0, 0, 0, 0))
    assert "speculative_config" in settings(plain, "MODEL")["LLM"]
    assert "speculative" not in settings(plain, "MODEL")["OpenRLHF"]  # it has no such option


def sizes(profile: Profile) -> tuple[int, ...]:
    return tuple(layout.tp for layout in profile.layouts)


def test_layouts_without_room_for_the_longest_response_are_left_out() -> None:
    question = replace(SMALL, gpus=4, responses=8)
    everything = question.engine()
    assert sizes(everything) == (1, 2, 4)
    short = replace(question, max_tokens=everything.kv_tokens[1] // 2).rollouts()
    long = replace(question, max_tokens=everything.kv_tokens[1], shape="straggler").rollouts()
    assert short.profile == everything
    assert sizes(long.profile) == (2, 4)
    assert long.replay(Task(Side(long.profile.layouts[0]), 0))


def test_layouts_that_do_not_fit_are_left_out_of_the_settings(tail: Advice) -> None:
    """A model of 34B does not fit on an A40 alone."""
    shape = {
        "num_hidden_layers": 60,
        "hidden_size": 7168,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "intermediate_size": 20480,
        "vocab_size": 64000,
    }
    from pat_vllm.simulator.modelled.hardware import modelled_profile

    profile = modelled_profile(shape, "A40", 8)
    assert sizes(profile) == (2, 4, 8)
    advice = replace(tail, rollouts=replace(tail.rollouts, profile=profile))
    options = pat_options(advice, "mine.json")
    assert options["base_tp"] == 2 and options["policy"]["profile"] == "mine.json"
    assert PATConfig.parse(options).resolve_layouts(8) == profile.layouts


# ---------------------------------------------------------------- the command

ARGUMENTS = (
    "advise",
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "A40",
    "--gpus",
    "2",
    "--responses",
    "32",
)
QUICK = ("--max-tokens", "256", "--iterations", "2", "--processes", "1")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


def test_the_command_writes_json_and_a_picture(tmp_path: Path) -> None:
    output, plot = tmp_path / "advice.json", tmp_path / "advice.png"
    done = invoke(
        *ARGUMENTS, *QUICK, "--acceptance", "0.5", "--output", str(output), "--plot", str(plot)
    )
    assert done.exit_code == 0, done.output
    content = json.loads(output.read_text())
    assert content["step_and_switch_times"] == "modelled" and content["responses"] == 32
    assert set(content["comes_from"]) == {"concurrency", "layout", "draft length"}
    assert len(content["pat"]["seconds"]) == len(content["best_static"]["seconds"]) == 2
    assert set(content["settings"]) == {"LLM", "vllm serve", "VeRL", "OpenRLHF"}
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    for expected in ("MODELLED, not measured", "seconds, modelled", "concurrency", "Simulated in"):
        assert expected in done.output
    saves = [line for line in done.output.splitlines() if re.search(r"PAT saves -?\d", line)]
    assert saves and all("modelled" in line for line in saves)


def test_processes_share_the_work_and_say_the_same(tail: Advice) -> None:
    alone = answer(SMALL)
    shared = answer(SMALL, processes=2)
    assert alone.to_json() == shared.to_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "B200"), "gpu 'B200' is unknown; allowed are A40, H100, H200"),
        (("--model", "gpt-9"), "model 'gpt-9' is unknown; allowed are llama-3.1-8b, qwen3-14b"),
        (("--model", "/nowhere/config.json"), "/nowhere/config.json cannot be read"),
        (("--shape", "square"), "--shape is 'square'; allowed are deepscaler, log-normal"),
        (("--lengths", "/nowhere/a.txt"), "--lengths /nowhere/a.txt cannot be read: No such"),
        (("--gpus", "1"), "--gpus is 1; allowed is 2 to 8: an engine is on one node"),
        (("--acceptance", "1.5"), "--acceptance is 1.5; allowed is 0 to 1: share of"),
        (("--responses", "0"), "--responses is 0; allowed is at least 2: all samples"),
        (("--iterations", "1"), "--iterations is 1; allowed is at least 2"),
        (("--plot", "/nowhere/a.png"), "--plot is /nowhere/a.png; /nowhere is no directory"),
        (("--max-tokens", "9000000"), "has no layout but tp=2 with memory for"),
        (("--profile", "mine.json"), "--gpu and --profile exclude each other"),
    ],
)
def test_errors_name_option_value_and_what_is_allowed(
    arguments: tuple[str, ...], message: str
) -> None:
    done = invoke(*ARGUMENTS, *QUICK, *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for arguments, missing in (((), "--gpu"), (("--gpu", "H100"), "--model")):
        done = invoke("advise", *arguments)
        assert done.exit_code == 2
        assert f"{missing} is missing; name a modelled GPU" in " ".join(done.output.split())
    profile = named_profile("llama-3.1-8b", "H100", 2)
    profile.save(tmp_path / "plain.json")
    done = invoke("advise", "--profile", str(tmp_path / "plain.json"), "--acceptance", "0.5")
    assert done.exit_code == 2 and "has no steps with drafts" in " ".join(
        done.output.replace("│", " ").split()
    )


def test_a_checkpoint_is_asked_for_its_shape_and_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from pat_vllm.model_size import MODEL_SHAPES

    tokenizer = Tokenizer(models.WordLevel({"w": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL_SHAPES["llama-3.1-8b"]))
    (tmp_path / "7.jsonl").write_text('{"input": "what is it", "output": "w w w w"}\n')
    question = replace(SMALL, model=str(tmp_path), lengths=tmp_path / "7.jsonl", max_tokens=None)
    rollouts = question.rollouts()
    assert set(rollouts.batches[0].lengths) == {4}
    assert set(rollouts.batches[0].num_prompt_tokens) == {3}
    assert sizes(rollouts.profile) == (1, 2) and tmp_path.name in rollouts.profile.title
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer .*tokenizer\.json cannot be read"):
        question.rollouts()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_experts", "has num_experts: .* model_type 'qwen3' cannot be modelled"),
        ("kv_lora_rank", "has kv_lora_rank: .* PAT does not serve it"),
    ],
)
def test_models_of_other_kinds_are_refused(tmp_path: Path, field: str, message: str) -> None:
    from pat_vllm.model_size import MODEL_SHAPES

    config = {**MODEL_SHAPES["qwen3-14b"], field: 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        replace(SMALL, model=str(tmp_path)).rollouts()


def test_every_row_has_a_label_of_its_own(accepted: Advice, tail: Advice) -> None:
    for advice in (accepted, tail):
        labels = [label for label, _ in rows(advice)]
        assert len(labels) == len(set(labels)) >= 3
        assert any(one is advice.sides.static for _, one in rows(advice))
        assert any(one is advice.ours for _, one in rows(advice))


def test_a_map_of_where_it_pays(tmp_path: Path) -> None:
    from benchmarks.where_it_pays import app as where_it_pays

    options = "--gpu A40 --model llama-3.1-8b --tail alike --tail straggler --per-gpu 4"
    quick = f"--max-tokens 128 --iterations 2 --output-dir {tmp_path}"
    done = CliRunner().invoke(where_it_pays, f"{options} {quick}".split())
    assert done.exit_code == 0, done.output
    text = (tmp_path / "where-it-pays.md").read_text()
    assert "MODELLED" in text and "| 8 x A40 | llama-3.1-8b | straggler | 4 |" in text
    cells = json.loads((tmp_path / "where-it-pays.json").read_text())
    assert [one["cell"]["tail"] for one in cells] == ["alike", "straggler"]
    assert not cells[0]["answer"]["pays"]
    assert (tmp_path / "where-it-pays.png").read_bytes().startswith(b"\x89PNG")


def test_the_noise_is_shipped() -> None:
    assert isinstance(measured_noise(), Profile)
