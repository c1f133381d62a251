"""`pat-vllm advise`: the verdict where the answer is known, settings to paste, errors, output."""

from __future__ import annotations

import ast
import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.advice.advice_text import heading, verdict
from pat_vllm.advice.advise_options import AdviseOptions
from pat_vllm.advice.rollouts import Rollouts, engine_of, rollouts_of
from pat_vllm.advice.settings import pat_options, settings
from pat_vllm.advice.simulations import (
    OWN_WORK,
    TUNED,
    Config,
    Gain,
    Task,
    draft_schedule,
    gain,
    replay_chain,
    seconds_of,
)
from pat_vllm.advice.verdict import Advice, advise
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.modelled.hardware import modelled_profile
from pat_vllm.models.checkpoint import named_config
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.predictor.draft_schedule import Schedule
from pat_vllm.profile import Profile
from tests.support.command_line import invoke

SMALL = AdviseOptions("llama-3.1-8b", "A40", 2, responses=32, max_tokens=256, iterations=2)


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    file = tmp_path_factory.mktemp("lengths") / "equal.txt"
    file.write_text("400\n" * 64)
    return advise(AdviseOptions("llama-3.1-8b", "A40", 4, responses=16, lengths=file, iterations=4))


@pytest.fixture(scope="module")
def tail() -> Advice:
    """Nearly all responses end early, one is 16 times as long; NVLink."""
    of = {"max_tokens": 1024, "shape": "straggler", "iterations": 3}
    return advise(AdviseOptions("llama-3.1-8b", "H100", 4, responses=1024, **of))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def accepted() -> Advice:
    """Four of five drafts are accepted."""
    return advise(replace(SMALL, gpus=4, shape="log-normal", acceptance=0.8, iterations=3))


@pytest.fixture(scope="module")
def mixture() -> Advice:
    of = {"max_tokens": 128, "shape": "log-normal", "iterations": 2}
    return advise(AdviseOptions("qwen3-30b-a3b", "H200", 4, responses=32, **of))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the verdict


def test_gain_and_its_interval() -> None:
    same = gain([2.0, 3.0], [2.0, 3.0])
    assert (same.mean, same.low, same.high, same.reaches) == (0, 0, 0, 0)
    half = gain([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert half.mean == half.low == half.high == pytest.approx(0.5) and half.reaches is None
    spread = gain([0.8, 1.0], [1.0, 1.0])
    assert spread.low < 0 < spread.mean < spread.high and spread.reaches == 0
    assert (spread.least, spread.most) == (0, pytest.approx(0.2))
    little = gain([0.997, 0.997], [1.0, 1.0])
    assert little.low > 0 and little.reaches == OWN_WORK


def test_equal_lengths_or_luck_are_no_gain(equal: Advice) -> None:
    luck = replace(equal, gain=gain([0.9, 1.04, 0.95, 1.0], [1.0] * 4))
    for advice in (equal, luck):
        assert not advice.pays and "Nothing to gain here" in verdict(advice)
    assert "the interval reaches 0" in verdict(luck)


def test_long_tail_on_fast_links_gains(tail: Advice) -> None:
    assert tail.pays and "Nothing" not in verdict(tail)
    assert 0.04 < tail.gain.low < tail.gain.mean < tail.gain.high < 0.3
    assert set(tail.sources) == {"concurrency", "layout"}  # no drafts are accepted
    # Without drafts, all that is gained at equal concurrency is the layouts'.
    assert tail.sources["layout"].gain == tail.gain and not tail.drafts
    assert " to tp4dp1 at " in tail.path


def test_accepted_drafts_are_advised(accepted: Advice) -> None:
    assert accepted.drafts and accepted.ours == accepted.pat
    assert accepted.sources["draft length"].gain.low > 0.2
    assert accepted.static.drafts != "k = 0"
    static, plain = (accepted.seconds(config) for config in (accepted.static, accepted.plain))
    assert sum(static) <= sum(plain)
    # The parts multiply to the whole.
    left = 1.0
    for source in accepted.sources.values():
        left *= 1 - source.gain.mean
    whole = gain(accepted.seconds(accepted.pat), accepted.seconds(accepted.own))
    assert left == pytest.approx(1 - whole.mean)


def test_seconds_count_to_the_last_response(tail: Advice) -> None:
    """While a trainer trains, an engine has gone back."""
    reports = tail.results[tail.ours]
    last = [max(report.finished) for report in reports]
    assert any(report.back > end for report, end in zip(reports, last, strict=True))
    counted = [end - report.began for report, end in zip(reports, last, strict=True)]
    assert seconds_of(reports) == pytest.approx(counted)


def seconds_in(rollouts: Rollouts, config: Config) -> tuple[float, ...]:
    """Of each batch, replayed anew."""
    rows = [replay_chain(rollouts, Task(config, i)) for i in range(len(rollouts.chains))]
    return tuple(report.seconds for reports in rows for report in reports)


def test_best_static_layout_is_the_fastest(mixture: Advice) -> None:
    static = mixture.seconds(mixture.static)
    for layout in mixture.rollouts.static.layouts:
        seconds = seconds_in(mixture.rollouts, Config(layout))
        assert sum(static) <= sum(seconds)
        if layout == mixture.static.layout:
            assert static == seconds


def test_every_static_layout_is_shown_where_all_are_asked_for(mixture: Advice) -> None:
    options = replace(SMALL, gpus=4, acceptance=0.5)
    few, every = advise(options), advise(replace(options, all_layouts=True))
    assert (few.static, few.gain) == (every.static, every.gain)
    shown = every.shown
    for layout in every.rollouts.static.layouts:
        assert Config(layout) in shown
        drafted = [
            config for config in shown if config.layout == layout and config.drafts != "k = 0"
        ]
        assert len(drafted) == 1, "with its best draft length"
        assert all(len(every.seconds(config)) == 2 for config in drafted)
    assert set(every.to_json()["all"]) == {str(config) for config in shown}
    assert "all" not in few.to_json() and len(few.shown) < len(shown)


def test_own_limits_are_those_of_a_replica_in_every_layout(tail: Advice) -> None:
    rollouts = tail.rollouts
    assert rollouts.static.max_num_seqs == {1: 256, 2: 512, 4: 1024}
    assert rollouts.with_own_limits.max_num_seqs == {1: 256, 2: 256, 4: 256}
    # 1,024 responses do not fit into one group of 256 at once.
    group = Layout(4, 1)
    at_once, in_turns = (
        replay_chain(rollouts, Task(Config(group, own_limits=own), 0)) for own in (False, True)
    )
    assert sum(run.seconds for run in in_turns) > sum(run.seconds for run in at_once)


def test_a_loss_is_called_one(equal: Advice) -> None:
    lost = replace(equal, gain=gain([1.02, 1.01, 1.0, 1.03], [1.0] * 4))
    assert not lost.pays
    assert "PAT is 1.5% slower (95% interval 3.6% slower to 0.5% faster;" in verdict(lost)
    assert verdict(lost).endswith("Take the static layout.")
    assert equal.path == "begins in tp4dp1 and stays there"
    assert replace(equal, ours=equal.static).path == equal.path


def test_tuned_schedule_drafts_less_for_more_requests() -> None:
    def schedule_of(acceptance: float) -> Schedule:
        rollouts = rollouts_of(replace(SMALL, gpus=4, drafting=1e-3, acceptance=acceptance))
        return draft_schedule(rollouts, Config(rollouts.static.layouts[-1], TUNED))

    schedule = schedule_of(0.5)
    assert schedule[0][0] == 1 and schedule[-1][1] == 4 * 256
    assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(schedule))
    assert schedule[0][2] > schedule[-1][2]
    assert {k for _, _, k in schedule_of(0.01)} == {0}


# ---------------------------------------------------------------- what is asked


def sizes(profile: Profile) -> tuple[int, ...]:
    return tuple(layout.tp for layout in profile.layouts)


def test_layouts_without_room_for_the_longest_response_are_left_out() -> None:
    options = replace(SMALL, gpus=4, responses=8)
    everything = engine_of(options, named_config("llama-3.1-8b"))
    assert sizes(everything) == (1, 2, 4)
    short = rollouts_of(replace(options, max_tokens=everything.kv_tokens[1] // 2))
    long = rollouts_of(replace(options, max_tokens=everything.kv_tokens[1], shape="straggler"))
    same_time = {"created": everything.created}
    assert short.static.model_copy(update=same_time) == everything
    assert sizes(long.static) == (2, 4)
    assert sizes(long.profile) == (2, 4)
    assert replay_chain(long, Task(Config(long.profile.layouts[0]), 0))


def test_checkpoint_is_asked_for_its_shape_and_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"w": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL_SHAPES["llama-3.1-8b"]))
    (tmp_path / "7.jsonl").write_text('{"input": "what is it", "output": "w w w w"}\n')
    options = replace(SMALL, model=str(tmp_path), lengths=tmp_path / "7.jsonl", max_tokens=None)
    rollouts = rollouts_of(options)
    assert set(rollouts.batches[0].lengths) == {4}
    assert set(rollouts.batches[0].num_prompt_tokens) == {3}
    assert sizes(rollouts.profile) == (1, 2) and tmp_path.name in rollouts.profile.title
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer .*tokenizer\.json cannot be read"):
        rollouts_of(options)


def test_engines_of_mixtures(mixture: Advice) -> None:
    """Static engines have more memory for KV than PAT's."""
    rollouts = mixture.rollouts
    names = [str(layout) for layout in rollouts.static.layouts]
    assert names == ["tp1dp4", "tp2dp2", "tp4dp1"]
    assert rollouts.static.key["static"] and "static" not in rollouts.profile.key
    assert rollouts.profile.kv_tokens[4] < rollouts.static.kv_tokens[4]
    assert {*rollouts.profile.layouts} <= {*rollouts.static.layouts}


@pytest.mark.parametrize(
    ("model", "gpu", "responses", "base_tp"),
    [
        ("qwen3-30b-a3b", "H100", 1024, 2),
        ("qwen3-14b", "A40", 8, 1),
        ("qwen3-14b", "A40", 256, 2),
    ],
)
def test_base_layout_leaves_room_for_the_responses(
    model: str, gpu: str, responses: int, base_tp: int
) -> None:
    """A rank with all weights has a fifth of its memory for KV, which a full batch does not fit."""
    options = AdviseOptions(
        model, gpu, 4, responses=responses, max_tokens=4096, shape="uniform", iterations=2
    )
    assert rollouts_of(options).profile.layouts[0].tp == base_tp


@pytest.mark.parametrize(
    ("model", "gpu", "kv_bytes"),
    [
        ("nemotron-nano-9b-v2", "H100", 4 * 2 * 8 * 128 * 2),
        ("qwen3-next-80b-a3b", "H200", 12 * 2 * 2 * 256 * 2),
        ("qwen3.5-35b-a3b", "H200", 10 * 2 * 2 * 256 * 2),
    ],
)
def test_engines_of_models_whose_layers_have_states(model: str, gpu: str, kv_bytes: int) -> None:
    """KV is that of the layers with attention; states take memory beside it. All groups and heads
    allow 8 ranks."""
    options = AdviseOptions(model, gpu, 8, responses=256, max_tokens=8192, iterations=2)
    profile = rollouts_of(options).profile
    assert profile.kv_bytes_per_token == kv_bytes
    assert all(tokens > 8192 for tokens in profile.kv_tokens.values())
    assert max(layout.tp for layout in profile.layouts) == 8


@pytest.mark.parametrize(
    ("heads", "gpus", "way_out"),
    [
        (28, 8, "name --gpus 2 or 4, for one of several engines"),
        (12, 8, "name --gpus 2 or 4, for one"),
        (14, 4, "name --gpus 2, for one"),
        (9, 2, "an engine on one GPU is all"),
    ],
)
def test_heads_that_vllm_cannot_split_over_all_gpus(
    heads: int, gpus: int, way_out: str, tmp_path: Path
) -> None:
    """Of Qwen2.5-7B, 1.5B and 0.5B, and SmolLM2-135M: no advice names such an engine."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": 1}
    config = {**MODEL_SHAPES["llama-3.1-8b"], **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = replace(SMALL, model=str(tmp_path), gpus=gpus)
    with pytest.raises(ValueError, match=f"--gpus is {gpus}, .* {heads} attention heads") as error:
        rollouts_of(options)
    assert way_out in str(error.value)
    if "--gpus" in way_out:
        assert max(sizes(rollouts_of(replace(options, gpus=2)).profile)) == 2


def test_prompt_and_response_fit_into_the_profiled_engine(tmp_path: Path) -> None:
    """What it was measured with bounds what is replayed, as `max_model_len` does in an engine."""
    modelled = modelled_profile("llama-3.1-8b", "H100", 2)
    key = {**modelled.key, "max_model_len": 2048}
    file = tmp_path / "measured.json"
    modelled.model_copy(update={"kind": "measured", "key": key}).save(file)
    options = AdviseOptions(profile=file, responses=32, iterations=2)

    def longest(**more: Any) -> tuple[int, int]:
        batches = rollouts_of(replace(options, **more)).batches
        return batches[0].max_tokens, max(max(batch.num_prompt_tokens) for batch in batches)

    assert longest()[0] == 1536
    assert longest(max_tokens=1000)[0] == 1000
    assert longest(max_tokens=1800)[1] == 248, "prompts are made up"
    with pytest.raises(ValueError, match="may have 16,385 tokens, but the engine of --profile was"):
        longest(max_tokens=16384)
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"response_length": 9000, "prompt_length": 48}\n')
    assert longest(lengths=lengths) == (2000, 48), "cut short as the engine would"
    trace = tmp_path / "trace.json"
    trace.write_text('{"lengths": [9, 1900], "num_prompt_tokens": [700, 200]}')
    with pytest.raises(ValueError, match=r"may have 2,100 tokens, .* max_model_len=2048"):
        rollouts_of(AdviseOptions(profile=file, trace=trace))


def test_traces_are_replayed_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    arrivals = [0.0, 0.0, 0.5, 3.0]
    content = {"lengths": [30, 200, 40, 90], "arrivals": arrivals, "acceptance": 0.8}
    file.write_text(json.dumps(content))
    advice = advise(AdviseOptions("llama-3.1-8b", "A40", 2, trace=file, all_layouts=True))
    (trace,) = advice.rollouts.batches
    assert (trace.lengths, trace.arrivals) == ((30, 200, 40, 90), tuple(arrivals))
    (report,) = advice.results[advice.static]
    assert all(end > at for end, at in zip(report.finished, arrivals, strict=True))
    assert trace.acceptance == 0.8 and advice.static.drafts != "k = 0"
    assert advice.gain.low == advice.gain.mean == advice.gain.most
    assert "of this trace alone" in verdict(advice) and "interval" not in verdict(advice)
    assert "trace of 4 responses of up to 200 tokens" in heading(advice)


def test_trajectories_are_replayed(tmp_path: Path) -> None:
    """By turns, with the memory that whole contexts need, and the prompts that the file tells."""
    file = tmp_path / "agents.jsonl"
    turn = {"response_length": 40, "appended_length": 500, "tool_seconds": 1.0}
    few, many = ([turn] * count + [{"response_length": 10}] for count in (1, 12))
    file.write_text(
        "".join(f'{{"turns": {json.dumps(turns)}}}\n' for turns in (few, few, few, many))
    )
    options = replace(SMALL, max_tokens=None, lengths=file)
    advice = advise(options)
    batch = advice.rollouts.batches[0]
    assert batch.max_tokens == 12 * 540 + 10 and batch.longest > batch.max_tokens
    assert {batch.first.count(first) for first in batch.trajectories} == {2, 13}
    assert "2 iterations of 32 trajectories of up to 6,490 tokens" in heading(advice)
    for report in (*advice.results[advice.static], *advice.results[advice.ours]):
        # Nothing is computed twice, but for the last block of a context.
        own = max(batch.num_prompt_tokens[first] for first in batch.trajectories) * 32
        assert report.prefilled < own + 520 * 13 * 32
    drawn = rollouts_of(replace(SMALL, shape="agents")).batches[0]
    assert len(drawn.trajectories) == 32 and drawn.has_turns


# ---------------------------------------------------------------- settings


def arguments_of(call: str) -> dict[str, Any]:
    """The keyword arguments of `LLM(...)`."""
    node = ast.parse(call).body[0].value  # type: ignore[attr-defined]
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}


def option(command: str, name: str) -> Any:
    words = shlex.split(command.replace("\\\n", " "))
    return json.loads(words[words.index(name) + 1])


def test_settings_with_pat_are_what_pat_reads(tail: Advice) -> None:
    forms = settings(tail, "MODEL", 256)
    given = arguments_of(forms["LLM"])
    pat = given["additional_config"]["pat"]
    layouts = PATConfig.parse(pat).resolve_layouts(given["tensor_parallel_size"])
    assert layouts == tail.rollouts.profile.layouts
    assert given["distributed_executor_backend"] == "pat" and given["max_num_seqs"] == 256
    assert "speculative_config" not in given
    assert option(forms["vllm serve"], "--additional-config") == {"pat": pat}
    note, _, command = forms["OpenRLHF"].partition("\n")
    assert option(command, "--vllm.pat") == pat and "max_num_seqs" not in command
    assert note.startswith("# WITHOUT max_num_seqs=256") and "leaves a GPU vLLM's 128" in note
    assert "actor_rollout_ref.rollout.name=pat" in forms["VeRL"]
    assert "state_dir='/PATH/state'" in forms["VeRL"]


def test_settings_without_pat_name_the_static_layout(equal: Advice) -> None:
    layout = equal.static.layout
    assert layout is not None
    for name, text in settings(equal, "MODEL", 256).items():
        assert "pat" not in text.lower(), name
        assert str(layout.tp) in text
        assert "max_num_seqs" in text.replace("-", "_"), name


def test_settings_with_drafts(accepted: Advice) -> None:
    paying = replace(accepted, gain=gain([0.9, 0.91, 0.92], [1.0] * 3))
    assert paying.pays
    forms = settings(paying, "MODEL", 256)
    assert all("ngram" in text for text in forms.values())
    assert arguments_of(forms["LLM"])["speculative_config"]["num_speculative_tokens"] == 7
    plain = settings(replace(accepted, gain=Gain(0, 0, 0, 0, 0)), "MODEL")
    assert "speculative_config" in plain["LLM"]
    assert "speculative" not in plain["OpenRLHF"]
    assert plain["OpenRLHF"].startswith("# WITHOUT the drafts of the other forms: OpenRLHF has no")


def test_settings_of_a_class_with_a_tower_are_for_its_text_alone(
    tail: Advice, equal: Advice
) -> None:
    """PAT's engine would refuse it otherwise."""
    for advice in (tail, equal):
        assert not any("language" in text for text in settings(advice, "MODEL", 256).values())
        rollouts = replace(advice.rollouts, text_only=True)
        forms = settings(replace(advice, rollouts=rollouts), "MODEL", 256)
        assert arguments_of(forms["LLM"])["language_model_only"] is True
        assert "--language-model-only \\\n" in forms["vllm serve"]
        assert (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.language_model_only=true"
            in (forms["VeRL"])
        )
        assert "# WITHOUT language_model_only=True of the other forms" in forms["OpenRLHF"]


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ("tp1dp4 tp2dp2 tp4dp1", {"layouts": [1, 2, 4], "experts": "tp"}),
        ("tp1dp4 tp4dp1", {"layouts": [1, 4], "experts": "ep"}),
        ("tp2dp2 tp4dp1", {"base_tp": 2, "layouts": [2, 4], "experts": "ep"}),
    ],
)
def test_options_of_mixtures_name_base_and_kind(
    mixture: Advice, layouts: str, expected: dict[str, Any]
) -> None:
    engine = mixture.rollouts.static.model_copy(
        update={
            "layouts": tuple(map(Layout.parse, layouts.split())),
            "key": {"experts": expected["experts"]},
        }
    )
    options = pat_options(replace(mixture, rollouts=replace(mixture.rollouts, profile=engine)))
    del options["policy"], options["state_dir"]
    assert options == {"base_tp": 1, **expected}


@pytest.mark.parametrize(("name", "experts"), [("tp2dp2", "tp"), ("tp4dp1", "ep")])
def test_static_settings_keep_experts_where_they_were_simulated(
    mixture: Advice, name: str, experts: str
) -> None:
    layout, spread = Layout.parse(name), experts == "ep"
    engine = mixture.rollouts.static.model_copy(update={"key": {"experts": experts}})
    rollouts = replace(mixture.rollouts, static=engine)
    static = replace(mixture, rollouts=rollouts, static=Config(layout), gain=Gain(0, 0, 0, 0, 0))
    forms = settings(static, "MODEL", 256)
    assert arguments_of(forms["LLM"]).get("enable_expert_parallel", False) == spread
    assert ("--enable-expert-parallel" in forms["vllm serve"]) == spread
    assert (f"expert_parallel_size={layout.tp}" in forms["VeRL"]) == spread
    # vLLM would cut or spread experts over data-parallel ranks, too.
    assert "data-parallel" not in forms["vllm serve"]
    assert forms["vllm serve"].startswith("# 2 engines" if layout.replicas == 2 else "vllm")


# ---------------------------------------------------------------- the command

ARGUMENTS = (
    *("advise", "--model", "llama-3.1-8b", "--gpu", "A40", "--gpus", "2", "--responses", "32"),
    *("--max-tokens", "256", "--iterations", "2"),
)


def test_command_writes_json_and_a_picture(tmp_path: Path) -> None:
    output, plot = tmp_path / "advice.json", tmp_path / "advice.png"
    files = ("--output", str(output), "--plot", str(plot))
    code, text = invoke(*ARGUMENTS, "--acceptance", "0.5", "--processes", "2", *files)
    assert code == 0, text
    content = json.loads(output.read_text())
    # Processes change nothing in the answer.
    alone = advise(replace(SMALL, acceptance=0.5, shape="deepscaler"))
    assert content["pat"]["seconds"] == pytest.approx(alone.seconds(alone.ours))
    assert content["best_static"]["seconds"] == pytest.approx(alone.seconds(alone.static))
    assert content["step_and_switch_times"] == "modelled" and content["responses"] == 32
    assert set(content["comes_from"]) == {"concurrency", "layout", "draft length"}
    assert len(content["pat"]["seconds"]) == len(content["best_static"]["seconds"]) == 2
    assert set(content["settings"]) == {"LLM", "vllm serve", "VeRL", "OpenRLHF"}
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    assert "MODELLED, not measured" in text
    assert "Replace CHECKPOINT by the model's directory" in text
    assert ("/PATH/" in str(content["settings"])) == ("Replace /PATH/state by" in text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "V100"), "gpu 'V100' is unknown; allowed are A10, A30, A40"),
        (("--model", "gpt-9"), "model 'gpt-9' is unknown; allowed are llama-3.1-8b, qwen3-8b"),
        (("--shape", "square"), "--shape is 'square'; allowed are deepscaler, log-normal"),
        (("--lengths", "/nowhere/a.txt"), "--lengths /nowhere/a.txt cannot be read: No such"),
        (("--gpus", "3"), "--gpus is 3; a layout splits the GPUs into equal groups"),
        (("--plot", "/nowhere/a.png"), "--plot is /nowhere/a.png; /nowhere is no directory"),
        (("--max-tokens", "9000000"), "has no layout but tp=2 with memory for"),
        (("--profile", "mine.json"), "--gpu and --profile exclude each other"),
        (("--trace", "mine.json"), "--responses and --trace exclude each other"),
    ],
)
def test_errors_name_option_value_and_what_is_allowed(
    arguments: tuple[str, ...], message: str
) -> None:
    code, text = invoke(*ARGUMENTS, *arguments)
    assert code == 2 and message in text


def test_missing_options_and_steps_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--gpus is 9; allowed is 2 to 8"):
        AdviseOptions(gpus=9)
    for arguments, missing in (((), "--gpu"), (("--gpu", "H100"), "--model")):
        code, text = invoke("advise", *arguments)
        assert code == 2 and f"{missing} is missing; name a modelled GPU" in text
    modelled_profile("llama-3.1-8b", "H100", 2).save(tmp_path / "plain.json")
    code, text = invoke("advise", "--profile", str(tmp_path / "plain.json"), "--acceptance", "0.5")
    assert code == 2 and "has no steps with drafts" in text
