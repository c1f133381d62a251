"""`pat-vllm advise`: the verdict where the answer is known, settings to paste, errors, output."""

from __future__ import annotations

import ast
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.advice.advice import OWN_WORK, TABLE, Advice, Gain, Static
from pat_vllm.advice.settings import settings
from pat_vllm.cli.advise import AdviseOptions, advice_for
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.models.known_models import MODEL_SHAPES
from tests.support.command_line import invoke
from tests.support.modelled_profile import modelled_profile

SMALL = AdviseOptions("llama-3.1-8b", "A40", 2, responses=32, max_tokens=256)


def advise(options: AdviseOptions) -> Advice:
    return advice_for(options)[0]


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    file = tmp_path_factory.mktemp("lengths") / "equal.txt"
    file.write_text("400\n" * 64)
    return advise(AdviseOptions("llama-3.1-8b", "A40", 4, responses=16, lengths=file))


@pytest.fixture(scope="module")
def tail() -> Advice:
    """Nearly all responses end early, one is 16 times as long; NVLink."""
    of = {"max_tokens": 1024, "shape": "straggler"}
    return advise(AdviseOptions("llama-3.1-8b", "H100", 4, responses=1024, **of))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def accepted() -> Advice:
    """Four of five drafts are accepted."""
    return advise(replace(SMALL, gpus=4, shape="log-normal", acceptance=0.8))


@pytest.fixture(scope="module")
def mixture() -> Advice:
    of = {"max_tokens": 128, "shape": "log-normal"}
    return advise(AdviseOptions("qwen3-30b-a3b", "H200", 4, responses=32, **of))  # type: ignore[arg-type]


def as_if(advice: Advice, *ours: float) -> Advice:
    """The same, were PAT's seconds so many times those of the best static engines."""
    advice = replace(advice)
    best = advice.static[advice.best][: len(ours)]
    gain = Gain.of([a * b for a, b in zip(ours, best, strict=True)], best)
    advice.__dict__["gain"] = gain  # a cached property
    return advice


# ---------------------------------------------------------------- the verdict


def test_gain_and_its_interval() -> None:
    same = Gain.of([2.0, 3.0], [2.0, 3.0])
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    half = Gain.of([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert half.mean == half.low == half.high == pytest.approx(0.5)
    spread = Gain.of([0.8, 1.0], [1.0, 1.0])
    assert spread.low < 0 < spread.mean < spread.high
    assert (spread.least, spread.most) == (0, pytest.approx(0.2))


def test_equal_lengths_or_luck_are_no_gain(equal: Advice) -> None:
    assert not equal.pays and not as_if(equal, 0.9, 1.04, 0.95, 1.0).pays
    assert not as_if(equal, 1 - OWN_WORK, 1 - OWN_WORK).pays, "PAT's own work takes as much"
    assert as_if(equal, 0.97, 0.971).pays


def test_long_tail_on_fast_links_gains(tail: Advice) -> None:
    assert tail.pays
    assert 0.04 < tail.gain.low < tail.gain.mean < tail.gain.high < 0.3
    assert tail.path.startswith("begins in ") and " to tp4dp1 at " in tail.path


def test_accepted_drafts_are_advised(accepted: Advice) -> None:
    assert accepted.best.drafts != "k = 0"
    plain = Static(accepted.best.layout, "k = 0")
    assert sum(accepted.pat) < 0.7 * sum(accepted.static[plain])
    layouts = {each.layout for each in accepted.static}
    assert {each.drafts for each in accepted.static} == {f"k = {k}" for k in (0, 1, 2, 4, 7)} | {
        TABLE
    }
    assert len(accepted.static) == 6 * len(layouts)


def test_lengths_are_sampled_and_the_seed_says_which() -> None:
    once, again, others = (advise(replace(SMALL, seed=seed)) for seed in (1, 1, 2))
    assert once.static == again.static and once.pat == again.pat
    assert once.pat != others.pat and len({*once.pat}) > 1


# ---------------------------------------------------------------- what is asked


def test_all_engines_that_are_compared_keep_the_same_in_8_bits() -> None:
    """KV takes half the memory, and reading it half the time; weights as well, but for the head."""
    options = replace(SMALL, gpus=4)
    in_kv = replace(options, kv_cache_dtype="fp8")
    plain, kv, both = map(advise, (options, in_kv, replace(in_kv, quantization="fp8")))
    for less, more in ((plain, kv), (kv, both)):
        for one, other in zip(less.engines.static, more.engines.static, strict=True):
            assert one.layout == other.layout and one.kv_tokens < other.kv_tokens
        pairs = [*zip(more.pat, less.pat, strict=True)]
        for each, seconds in less.static.items():
            pairs += zip(more.static[each], seconds, strict=True)
        assert all(ours < theirs for ours, theirs in pairs)
    first, halved = (advice.engines.static[0].kv_tokens for advice in (plain, kv))
    assert halved == pytest.approx(2 * first, rel=0.001)
    assert both.engines.title.endswith("(pcie), quantization=fp8, kv_cache_dtype=fp8")


def test_all_engines_that_are_compared_have_the_drafter(tmp_path: Path) -> None:
    """One layer more of KV and weights, and a pass at every draft length."""
    options = replace(SMALL, gpus=4, acceptance=0.6)
    free, mtp = advise(options), advise(replace(options, drafter="mtp"))
    assert mtp.engines.title.endswith(", mtp drafts") and free.engines.drafter is None
    for one, other in zip(free.engines.static, mtp.engines.static, strict=True):
        assert one.layout == other.layout and one.kv_tokens > other.kv_tokens
    assert all(
        ours > theirs
        for each, seconds in free.static.items()
        if each in mtp.static and each.drafts != TABLE
        for ours, theirs in zip(mtp.static[each], seconds, strict=True)
    )
    (tmp_path / "config.json").write_text(
        json.dumps({**MODEL_SHAPES[SMALL.model or ""], "architectures": ["Eagle3LlamaForCausalLM"]})
    )
    eagle3 = advise(replace(options, drafter=str(tmp_path)))
    for advice, config in (
        (mtp, {"method": "mtp"}),
        (eagle3, {"method": "eagle3", "model": str(tmp_path)}),
    ):
        given = arguments_of(settings(advice, "MODEL", 256)["LLM"])["speculative_config"]
        assert given.items() >= config.items() and given["num_speculative_tokens"]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"acceptance": None}, "--drafter is mtp: name the share"),
        ({"drafting": 1e-3}, "--drafting and --drafter exclude each other"),
        ({"drafter": "medusa"}, "--drafter is 'medusa'; allowed are mtp"),
    )
    for changed, words in wrong:
        with pytest.raises(ValueError, match=words):
            advise(replace(options, **{"drafter": "mtp", **changed}))


def test_a_measured_engines_dtypes_are_in_its_settings(tmp_path: Path) -> None:
    modelled = modelled_profile("llama-3.1-8b", "H100", 2)
    key = {**modelled.key, "kv_cache_dtype": "fp8_e5m2", "quantization": None}
    modelled.model_copy(update={"kind": "measured", "key": key}).save(tmp_path / "measured.json")
    options = AdviseOptions(profile=tmp_path / "measured.json", responses=32, max_tokens=64)
    assert advise(options).engines.dtypes == {"kv_cache_dtype": "fp8_e5m2"}
    with pytest.raises(ValueError, match="--kv-cache-dtype and --profile exclude each other"):
        advise(replace(options, kv_cache_dtype="fp8"))


def sizes(advice: Advice) -> list[int]:
    return [engine.layout.tp for engine in advice.engines.static]


def test_layouts_without_room_for_the_longest_response_are_left_out() -> None:
    options = replace(SMALL, gpus=4, responses=2)
    short = advise(options)
    assert sizes(short) == [1, 2, 4]
    room = short.engines.static[0].kv_tokens
    long = advise(replace(options, max_tokens=room, shape="straggler"))
    assert sizes(long) == [2, 4] and long.engines.planner.layouts[0].tp > 1


def test_checkpoint_is_asked_for_its_shape_and_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"w": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL_SHAPES["llama-3.1-8b"]))
    (tmp_path / "7.jsonl").write_text('{"input": "what is it", "output": "w w w w"}\n')
    options = replace(SMALL, model=str(tmp_path), lengths=tmp_path / "7.jsonl", max_tokens=None)
    advice, give = advice_for(options)
    assert sizes(advice) == [1, 2] and tmp_path.name in advice.engines.title
    assert give is not None and give.responses == 1
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer .*tokenizer\.json cannot be read"):
        advise(options)


def test_static_engines_of_mixtures_have_more_memory_for_kv_than_pats(mixture: Advice) -> None:
    assert mixture.engines.experts == "tp" == mixture.engines.options["experts"]
    ours, _ = mixture.engines.planner.room(Layout(4, 1))
    assert ours < mixture.engines.static[-1].kv_tokens


@pytest.mark.parametrize(
    ("heads", "gpus", "way_out"),
    [
        (28, 8, "name --gpus 2 or 4, for one of several engines"),
        (14, 4, "name --gpus 2, for one"),
        (9, 2, "an engine on one GPU is all"),
    ],
)
def test_heads_that_vllm_cannot_split_over_all_gpus(
    heads: int, gpus: int, way_out: str, tmp_path: Path
) -> None:
    """Of Qwen2.5-7B and 0.5B, and SmolLM2-135M."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": 1}
    config = {**MODEL_SHAPES["llama-3.1-8b"], **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = replace(SMALL, model=str(tmp_path), gpus=gpus)
    with pytest.raises(ValueError, match=f"--gpus is {gpus}, .* {heads} attention heads") as error:
        advise(options)
    assert way_out in str(error.value)


def test_a_measured_engine_bounds_what_is_asked(tmp_path: Path) -> None:
    """As `max_model_len` does in an engine. Its layouts, limits and memory are those of all."""
    modelled = modelled_profile("llama-3.1-8b", "H100", 2)
    key = {**modelled.key, "max_model_len": 2048}
    file = tmp_path / "measured.json"
    modelled.model_copy(update={"kind": "measured", "key": key}).save(file)
    options = AdviseOptions(profile=file, responses=32)
    advice = advise(options)
    assert not advice.engines.modelled and advice.engines.planner.layouts == modelled.layouts
    same = advise(replace(options, max_tokens=1536))
    assert advice.pat == same.pat, "a fourth is left to prompts"
    with pytest.raises(ValueError, match="may have 16,385 tokens, but the engine of --profile was"):
        advise(replace(options, max_tokens=16384))


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
    assert layouts == tail.engines.planner.layouts
    assert given["distributed_executor_backend"] == "pat" and given["max_num_seqs"] == 256
    assert "speculative_config" not in given
    assert option(forms["vllm serve"], "--additional-config") == {"pat": pat}
    note, _, command = forms["OpenRLHF"].partition("\n")
    assert option(command, "--vllm.pat") == pat and "max_num_seqs" not in command
    assert note.startswith("# WITHOUT max_num_seqs=256") and "leaves a GPU vLLM's 128" in note
    assert "actor_rollout_ref.rollout.name=pat" in forms["VeRL"]


def test_settings_without_pat_name_the_static_layout(equal: Advice) -> None:
    for name, text in settings(equal, "MODEL", 256).items():
        assert "pat" not in text.lower(), name
        assert str(equal.best.layout.tp) in text
        assert "max_num_seqs" in text.replace("-", "_"), name


def test_settings_with_drafts(accepted: Advice) -> None:
    forms = settings(as_if(accepted, 0.9, 0.91, 0.92), "MODEL", 256)
    assert all("ngram" in text for text in forms.values())
    assert arguments_of(forms["LLM"])["speculative_config"]["num_speculative_tokens"] == 7
    plain = settings(as_if(accepted, 1.0, 1.0), "MODEL")
    assert "speculative_config" in plain["LLM"] and "speculative" not in plain["OpenRLHF"]
    assert plain["OpenRLHF"].startswith("# WITHOUT the drafts of the other forms: OpenRLHF has no")


def test_settings_of_a_class_with_a_tower_are_for_its_text_alone(
    tail: Advice, equal: Advice
) -> None:
    """PAT's engine would refuse it otherwise."""
    for advice in (tail, equal):
        assert not any("language" in text for text in settings(advice, "MODEL", 256).values())
        text_only = replace(advice, engines=replace(advice.engines, text_only=True))
        forms = settings(text_only, "MODEL", 256)
        assert arguments_of(forms["LLM"])["language_model_only"] is True
        assert "--language-model-only \\\n" in forms["vllm serve"]
        assert "engine_kwargs.vllm.language_model_only=true" in forms["VeRL"]
        assert "# WITHOUT language_model_only=True of the other forms" in forms["OpenRLHF"]


def test_settings_name_what_is_in_8_bits(tail: Advice, equal: Advice) -> None:
    dtypes = {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    for advice in (tail, equal):
        plain = settings(advice, "MODEL", 256)
        assert not any("fp8" in text for text in plain.values())
        forms = settings(replace(advice, engines=replace(advice.engines, dtypes=dtypes)), "MODEL")
        assert arguments_of(forms["LLM"]).items() >= dtypes.items()
        assert "--quantization fp8_per_channel" in forms["vllm serve"]
        assert "--kv-cache-dtype fp8" in forms["vllm serve"]
        assert "rollout.quantization=fp8 " in forms["VeRL"]
        assert "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8" in forms["VeRL"]
        assert "# WITHOUT kv_cache_dtype=fp8 of the other forms" in forms["OpenRLHF"]


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_static_settings_keep_experts_as_they_were_computed(
    mixture: Advice, tp: int, experts: Any
) -> None:
    layout = Layout.of(tp, 4)
    static = replace(mixture, engines=replace(mixture.engines, experts=experts))
    static = as_if(static, 1.0, 1.0)
    static.__dict__["best"] = Static(layout, "k = 0")  # a cached property
    forms = settings(static, "MODEL", 256)
    spread = experts == "ep" and tp > 1
    assert arguments_of(forms["LLM"]).get("enable_expert_parallel", False) == spread
    assert ("--enable-expert-parallel" in forms["vllm serve"]) == spread
    assert (f"expert_parallel_size={tp}" in forms["VeRL"]) == spread
    # vLLM would cut or spread experts over data-parallel ranks, too.
    assert "data-parallel" not in forms["vllm serve"]
    assert forms["vllm serve"].startswith("vllm" if tp == 4 else f"# {4 // tp} engines")


# ---------------------------------------------------------------- the command

ARGUMENTS = (
    *("advise", "--model", "llama-3.1-8b", "--gpu", "A40", "--gpus", "2", "--responses", "32"),
    *("--max-tokens", "256"),
)


def test_command_writes_json(tmp_path: Path) -> None:
    output = tmp_path / "advice.json"
    code, text = invoke(*ARGUMENTS, "--acceptance", "0.5", "--output", str(output))
    assert code == 0, text
    content = json.loads(output.read_text())
    advice = advise(replace(SMALL, acceptance=0.5))
    assert content["pat"]["seconds"] == pytest.approx(advice.pat)
    assert content["best_static"] == str(advice.best) and content["pays"] == advice.pays
    assert content["step_and_switch_times"] == "modelled"
    assert set(content["settings"]) == {"LLM", "vllm serve", "VeRL", "OpenRLHF"}
    assert "MODELLED, not measured" in text
    assert "Replace CHECKPOINT by the model's directory" in text


def test_what_an_engine_would_warn_of_is_said() -> None:
    code, text = invoke("advise", "--model", "qwen3-next-80b-a3b", "--gpu", "A40")
    assert code == 0 and "one layout, tp=8, is kept, and the engine never switches" in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "V100"), "gpu 'V100' is unknown; allowed are A10, A30, A40"),
        (("--model", "gpt-9"), "model 'gpt-9' is unknown; allowed are llama-3.1-8b, qwen3-8b"),
        (("--shape", "square"), "--shape is 'square'; allowed are deepscaler, log-normal"),
        (("--lengths", "/nowhere/a.txt"), "--lengths /nowhere/a.txt cannot be read: No such"),
        (("--gpus", "3"), "--gpus is 3; a layout splits the GPUs into equal groups"),
        (("--output", "/nowhere/a.json"), "--output is /nowhere/a.json; /nowhere is no directory"),
        (("--max-tokens", "9000000"), "no layout has memory for a request of 9,000,512 tokens"),
        (("--profile", "mine.json"), "--gpu and --profile exclude each other"),
        (("--kv-cache-dtype", "nvfp4"), "--kv-cache-dtype is 'nvfp4'; allowed is auto, fp8, fp8_"),
        (("--quantization", "awq"), "--quantization is 'awq'; allowed is fp8, fp8_per_tensor, fp8"),
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
