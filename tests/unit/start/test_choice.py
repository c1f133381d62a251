"""Which layouts an engine keeps where its user does not say. Modelled, nothing measured."""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import replace
from typing import Any

import pytest

from pat_vllm.advice.batches import sampled_batches
from pat_vllm.advice.engines import load_of, modelled_engines
from pat_vllm.cli.advise import AdviseOptions
from pat_vllm.config import PATConfig
from pat_vllm.modelled.gpus import GPUS, Device
from pat_vllm.modelled.shapes import drawn_lengths
from pat_vllm.models.checkpoint import named_config
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.quantization import PLAIN, Quantized
from pat_vllm.start import choice
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.choice import Choice, choose
from pat_vllm.start.load import Load
from pat_vllm.start.memory_estimate import estimate
from tests.support.engine_shapes import engine_shape

A40, H100, H200 = (GPUS[name].device for name in ("A40", "H100", "H200"))
UNKNOWN = Device(48 << 30, "8.9")
LONGEST = 16384 + 512
TINY = {
    **MODEL_SHAPES["llama-3.1-8b"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 128,
    "vocab_size": 512,
}
QWEN3_8B = {
    **MODEL_SHAPES["qwen3-14b"],
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
}
QWEN3_32B = {
    **MODEL_SHAPES["qwen3-14b"],
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}


def chosen(
    model: str | dict[str, Any],
    device: Device | None,
    pat: dict[str, Any] | None = None,
    ranks: int = 8,
    *,
    load: Load | None = None,
    quantized: Quantized = PLAIN,
    **engine: Any,
) -> Choice:
    config = dict(MODEL_SHAPES[model]) if isinstance(model, str) else model
    shape = EngineShape((), **{"max_model_len": 32768, **engine})
    load = load or Load.usual(shape.max_num_seqs, ranks, shape.max_model_len)
    return choose(
        config, PATConfig.parse(pat), shape, ranks, device, quantized=quantized, load=load
    )


def sizes(*args: Any, **options: Any) -> list[int]:
    layouts: list[int] = chosen(*args, **options).options["layouts"]
    return layouts


def test_half_the_bytes_make_room_for_narrower_layouts() -> None:
    """Of KV in fp8, which alone leaves as many bytes for more tokens, and of weights, too."""
    kept = [
        chosen("qwen3-32b", H100, quantized=quantized)
        for quantized in (PLAIN, Quantized(kv_bytes=1), Quantized(1, 1))
    ]
    assert [[layout.tp for layout in each.layouts] for each in kept] == [[4, 8], [2, 8], [1, 4, 8]]
    assert "tp=1 9.4 GiB" in kept[0].found and "tp=1 9.4 GiB" in kept[1].found
    assert "tp=1 38.5 GiB" in kept[2].found


@pytest.mark.parametrize(
    ("model", "device", "expected"),
    [
        ("llama-3.1-8b", A40, [2, 8]),
        ("qwen3-14b", A40, [2, 8]),
        ("qwen3-30b-a3b", H100, [4, 8]),
        ("llama-3.1-8b", H200, [1, 4, 8]),
    ],
)
def test_the_layouts_with_which_a_batch_is_fastest(
    model: str, device: Device, expected: list[int]
) -> None:
    """As a simulator of the policy has it in the sets that come near."""
    assert sizes(model, device) == expected


def test_a_load_decides() -> None:
    few, many = Load(16, [1000] * 8), Load(4096, [16000] * 8)
    assert sizes("qwen3-14b", A40, load=few)[0] < sizes("qwen3-14b", A40, load=many)[0]
    assert Load.usual(1024, 8, 32768).responses == Load.usual(256, 8, 32768).responses == 2048
    assert Load.usual(16, 8, 32768).responses == 128
    assert max(Load.usual(16, 8, 1024).lengths) <= 768


def test_what_is_named_is_kept() -> None:
    assert sizes("qwen3-14b", A40, {"layouts": [1, 2]}) == [1, 2]
    assert sizes("qwen3-14b", A40, {"layouts": [2, 4], "base_tp": 1}) == [1, 2, 4]
    assert sizes("qwen3-14b", A40, {"base_tp": 1})[0] == 1
    assert sizes("qwen3-14b", A40, {"policy": {"kind": "static", "tp": 1}})[0] == 1
    schedule = {"kind": "schedule", "switch_at": {64: 2, 8: 4}}
    assert {2, 4} <= {*sizes("qwen3-14b", A40, {"policy": schedule})}
    with pytest.raises(ValueError, match="names tp=3"):
        chosen("qwen3-14b", A40, {"policy": {"kind": "static", "tp": 3}})


def test_experts_are_cut_where_they_can_be_and_as_asked_for() -> None:
    def kind(pat: dict[str, Any]) -> str | None:
        return chosen("qwen3-30b-a3b", H200, pat, 4).experts

    assert kind({}) == "tp" and kind({"experts": "ep"}) == "ep"
    assert "experts" not in chosen("qwen3-14b", H200, ranks=4).options
    odd = {**MODEL_SHAPES["qwen3-30b-a3b"], "moe_intermediate_size": 762}
    assert chosen(odd, H200, ranks=4).experts == "ep"


def test_too_little_room_is_told_by_the_option_that_helps() -> None:
    far = chosen("qwen3-14b", A40, {"base_tp": 1})
    assert "pat.base_tp=1 leaves" in (far.warning or "") and "'auto'" in (far.warning or "")
    short = chosen("qwen3-30b-a3b", H100, {"base_tp": 1}, max_model_len=262144)
    assert "a request may have 262,144" in (short.warning or "")
    for model, device in (("qwen3-14b", A40), ("qwen3-30b-a3b", H100)):
        picked = chosen(model, device, max_model_len=262144 if device is H100 else 40960)
        assert picked.warning is None
        assert "GiB of KV a rank (static engines: tp=1 " in picked.found
        assert "pat.base_tp, pat.layouts and pat.experts choose others" in picked.found


def test_what_helps_is_what_the_user_has_not_done() -> None:
    auto = chosen("qwen3-14b", A40, max_model_len=16384)
    assert auto.more_room.startswith("name pat.base_tp=4 or 8, raise gpu_memory_utilization")
    widest = chosen(QWEN3_32B, replace(A40, memory=24 << 30))
    assert widest.more_room.startswith(
        "raise gpu_memory_utilization, lower max_model_len, or lower"
    )
    for named in ({"base_tp": 2}, {"layouts": [2, 8]}):
        more_room = chosen("qwen3-14b", A40, named).more_room
        assert more_room.startswith(
            "leave pat.base_tp and pat.layouts at 'auto', or name pat.base_tp="
        )


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "qwen3-next-80b-a3b"])
def test_auto_leaves_room_for_what_the_computation_misses(model: str) -> None:
    """At any size of the memory: 4% of it less, and a request still fits, or a warning says that it
    may not."""
    warned = []
    for gigabytes in range(16, 97):
        device = Device(gigabytes << 30, "8.9")
        picked = chosen(model, device)
        shape = EngineShape(picked.layouts, max_model_len=32768)
        size = ModelSize.of(MODEL_SHAPES[model])
        left = estimate(size, shape, device).kv - 4 * device.memory // 100
        needed = estimate(size, replace(shape, kv_cache_memory_bytes=max(1, left)), device)
        fits = needed.kv_tokens[picked.layouts[0].tp] >= 32768
        warned.append("a request may have" in (picked.warning or ""))
        assert fits or warned[-1], gigabytes
    assert not warned[-1] and warned == sorted(warned, reverse=True)


def test_an_unknown_device_decides_by_its_memory() -> None:
    assert sizes("llama-3.1-8b", UNKNOWN)[0] == 2
    assert sizes("llama-3.1-8b", replace(UNKNOWN, memory=96 << 30)) == [1, 4, 8]
    assert sizes("qwen3-14b", replace(UNKNOWN, memory=24 << 30))[0] == 4
    assert sizes(QWEN3_32B, UNKNOWN) == [4, 8], "more than half of the KV is left"
    assert sizes(QWEN3_32B, replace(UNKNOWN, memory=30 << 30)) == [8]


@pytest.mark.parametrize("device", [None, H100, UNKNOWN, Device(4 << 30)])
def test_a_model_that_takes_no_memory_begins_with_one_rank(device: Device | None) -> None:
    on_cpu: dict[str, Any] = {"attention": "CPU_ATTN", "weights": "materialized"}
    for ranks, expected in ((2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 6])):
        tps = sizes(TINY | {"num_attention_heads": 24}, Device(4 << 30), ranks=ranks, **on_cpu)
        heads = [tp for tp in expected if tp != 6]
        assert tps == heads
    assert sizes(TINY, device, {"base_tp": 1}, ranks=2) == [1, 2]


def test_copies_of_weights_count() -> None:
    device = Device(28 << 30)
    inplace, copies = (
        sizes("llama-3.1-8b", device, weights=weights) for weights in ("inplace", "materialized")
    )
    assert inplace[0] < copies[0]


def test_a_model_of_unknown_sizes_keeps_the_usual_layouts() -> None:
    unknown = {"num_experts": 4, "moe_intermediate_size": 64, "model_type": "other"}
    assert sizes(unknown, H100, ranks=4) == [1, 2, 4]
    assert sizes(TINY, None, ranks=4) == [1, 2, 4]


CONFIGS: dict[str, dict[str, Any]] = {
    "8B": QWEN3_8B,
    "14B": dict(MODEL_SHAPES["qwen3-14b"]),
    "32B": QWEN3_32B,
    "30B-A3B": dict(MODEL_SHAPES["qwen3-30b-a3b"]),
}
CHOICES = {
    ("8B", "L40S"): (2, 8),
    ("14B", "L40S"): (2, 8),
    ("32B", "L40S"): (4, 8),
    ("30B-A3B", "L40S"): (4,),
    ("8B", "A100"): (2, 8),
    ("14B", "A100"): (2, 8),
    ("32B", "A100"): (4, 8),
    ("30B-A3B", "A100"): (4, 8),
    ("8B", "H100"): (2, 8),
    ("14B", "H100"): (2, 8),
    ("32B", "H100"): (4, 8),
    ("30B-A3B", "H100"): (4, 8),
    ("8B", "B200"): (1, 4, 8),
    ("14B", "B200"): (1, 4, 8),
    ("32B", "B200"): (2, 8),
    ("30B-A3B", "B200"): (4, 8),
}
"""By default, of eight GPUs."""


@pytest.mark.parametrize(("model", "gpu"), CHOICES)
def test_advise_agrees(monkeypatch: pytest.MonkeyPatch, model: str, gpu: str) -> None:
    """At the same load. Engines: tests/vllm/start/test_layout_choice.py."""
    config, device = CONFIGS[model], GPUS[gpu].device
    monkeypatch.setitem(MODEL_SHAPES, model, config)  # type: ignore[arg-type]
    given = {"max_model_len": LONGEST}
    shape, picked = engine_shape(config, PATConfig(), 8, given, device)
    assert tuple(layout.tp for layout in picked.layouts) == CHOICES[model, gpu]
    names = ", ".join(map(str, shape.layouts))
    assert picked.found.startswith(f"layouts {names}, by modelled times")
    assert estimate(ModelSize.of(config, 2), shape, device).kv_tokens[shape.layouts[0].tp] > LONGEST
    assert (len(shape.layouts) == 1) == ("one layout" in (picked.warning or ""))
    # Of the load that `advise` is asked about, as many responses will come.
    monkeypatch.setattr(Load, "usual", classmethod(lambda cls, *of: exact))
    options = AdviseOptions(model, gpu, 8, responses=2048)
    batches, longest = sampled_batches(options, None, 0.0)
    assert longest == LONGEST
    exact = load_of(batches[0], 0.0)
    advised = modelled_engines(options, named_config(model), batches[0], 0.0, longest)
    engine, picked = engine_shape(config, PATConfig(), 8, given, device)
    assert engine.layouts == advised.planner.layouts and picked.warning == advised.warning


@pytest.mark.parametrize(
    ("gpu", "ranks"), [("RTX 4090", 8), ("A40", 8), ("A100 40GB", 4), ("H100", 2)]
)
@pytest.mark.parametrize("model", CONFIGS)
def test_no_engine_keeps_one_layout_unsaid(model: str, gpu: str, ranks: int) -> None:
    """And layouts that it says to name have room."""
    device = GPUS[gpu].device
    picked = chosen(CONFIGS[model], device, ranks=ranks)
    warning = picked.warning or ""
    said = "leaves" in warning or f"one layout, tp={ranks}, is kept, and the" in warning
    assert said == (len(picked.layouts) == 1)
    if (named := re.search(r"pat\.layouts=(\[.*?\])", warning)) is not None:
        asked = chosen(CONFIGS[model], device, {"layouts": literal_eval(named[1])}, ranks)
        assert len(asked.layouts) > 1 and "a request may have" not in (asked.warning or "")


def test_why_one_layout_is_kept() -> None:
    def why(*args: Any, **options: Any) -> str:
        return chosen(*args, **options).warning or ""

    earns_nothing = why("qwen3-30b-a3b", GPUS["L40S"].device, max_model_len=LONGEST)
    assert "one layout, tp=4, is kept" in earns_nothing
    assert "take more from the KV cache than" in earns_nothing
    assert "name pat.layouts=[4, 8] to have more" in earns_nothing
    assert "weights of a narrower base layout" in why("qwen3-next-80b-a3b", A40)
    long = why("qwen3-30b-a3b", A40, max_model_len=262144, ranks=4)
    assert "no request of max_model_len=262144 has room; for more, " in long
    assert "splits over no other part of 3 ranks" in why(
        TINY | {"num_attention_heads": 7}, H100, ranks=3
    )
    # Who has asked for one is told nothing.
    for asked in ({"layouts": [8]}, {"base_tp": 8}):
        assert not why(QWEN3_32B, A40, asked)
    assert not why("llama-3.1-8b", A40, ranks=1)


def test_an_engine_that_knows_only_the_most_that_may_come_looks_at_less() -> None:
    """At the most, one layout is faster, for all KV is needed; at less, several are."""
    load = Load.usual(256, 8, 32768)
    assert sizes(QWEN3_32B, H100) == sizes(QWEN3_32B, H100, load=load) == [4, 8]
    assert sizes(QWEN3_32B, H100, load=replace(load, at_most=False)) == [8]
    assert [part.responses for part in load.smaller()] == [1024, 512, 256, 128]
    assert [part.responses for part in replace(load, responses=2).smaller()] == [1]
    assert not replace(load, at_most=False).smaller()


def test_a_layout_alone_where_others_would_take_its_memory() -> None:
    load = Load(2048, [16000] * 8)
    search = choice._Search(PATConfig(), EngineShape((), max_model_len=16384), 8, None, None, H100)
    assert (8,) in list(search.sets())
    assert len(sizes(QWEN3_32B, A40, load=load, max_model_len=16384)) == 1


def as_if(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[int, ...], float]) -> None:
    """Batches take so long in sets of layouts, and forever in others."""
    monkeypatch.setattr(
        choice._Search, "_seconds", lambda self, sizes, machine, load: seconds.get(sizes, 1e9)
    )


def test_further_layouts_have_to_earn_where_all_kv_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their seconds are as good as equal then; the batch waits for the memory that they take."""
    as_if(monkeypatch, {(1, 8): 100.0, (1,): 100.5})
    few, many = Load(64, [4000]), Load(2048, [16000])
    assert sizes("qwen3-14b", A40, load=few) == [1, 8]
    assert sizes("qwen3-14b", A40, load=many) == [1]
    assert Load(3, [5, 3, 1], 10).most_tokens == max(3 * 11, 2 * 13, 15)


def test_of_layouts_alone_that_are_as_fast_the_one_with_more_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KV is short then. Which of them is faster is predicted to a few percent only."""
    as_if(monkeypatch, {(4, 8): 110.0, (4,): 99.0, (8,): 100.0})
    load = Load(488, drawn_lengths("uniform", 488, 16384, 0).tolist())
    assert sizes(QWEN3_32B, A40, load=load, max_model_len=16896) == [8]
    as_if(monkeypatch, {(4, 8): 110.0, (4,): 97.0, (8,): 100.0})
    assert sizes(QWEN3_32B, A40, load=load, max_model_len=16896) == [4]
