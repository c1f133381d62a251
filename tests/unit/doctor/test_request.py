"""The engines that the doctor starts."""

from __future__ import annotations

from typing import Any

import pytest

from pat_vllm.doctor.request import Request, prompts, stock_of


def test_by_default_it_has_vllms_memory_and_graphs_and_every_layout() -> None:
    engine = Request(8).with_pat("here", on_cpu=False)
    assert engine.pop("additional_config") == {
        "pat": {
            "policy": {"kind": "static"},
            "kv_transfer": "migrate",
            "base_tp": 1,
            "layouts": [1, 2, 4, 8],
        }
    }
    assert engine == {
        "model": "here",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "seed": 0,
        "enable_sleep_mode": True,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 8,
        "distributed_executor_backend": "pat",
    }


def test_on_cpu_it_is_eager_with_little_memory_and_weights_in_place() -> None:
    request = Request(2, pat={"weights": "materialized"}, engine={"block_size": 32})
    engine = request.with_pat("here", on_cpu=True)
    assert engine["additional_config"]["pat"]["weights"] == "inplace"
    assert engine["dtype"] == "float32" and engine["enforce_eager"] is True
    assert engine["kv_cache_memory_bytes"] == 256 << 20 and engine["block_size"] == 32
    compiled = Request(2, engine={"compilation_config": {"mode": 3}}).with_pat("here", on_cpu=True)
    assert "enforce_eager" not in compiled
    assert Request(2, shape="linear").with_pat("here", on_cpu=True)["dtype"] == "bfloat16"


def test_what_a_user_gives_is_kept() -> None:
    given: dict[str, Any] = {
        **{"gpu_memory_utilization": 0.5, "max_num_seqs": 64, "max_model_len": 1024},
        **{"enforce_eager": True, "enable_sleep_mode": False, "worker_extension_cls": "x.Y"},
        **{"kv_cache_memory_bytes": 1 << 30, "dtype": "float16", "seed": 7},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "additional_config": {"more": 1},
    }
    policy = {"kind": "predictor", "length_bound": 64, "profile": "p"}
    pat = {"base_tp": 2, "policy": policy, "kv_transfer": "recompute"}
    engine = Request(4, engine=given, pat=pat).with_pat("here", on_cpu=False)
    additional = engine["additional_config"]
    assert {**engine, "additional_config": given["additional_config"]}.items() >= given.items()
    # Files of the user's own model are neither read nor written.
    kept = {"kind": "predictor", "length_bound": 64}
    layouts = {"layouts": [2, 4]}
    assert additional == {"more": 1, "pat": {**pat, "policy": kept, **layouts}}
    # More than the random model's contexts: also of vLLM's "as much as there is room for".
    for length in (1 << 17, -1):
        of_length = Request(2, engine={"max_model_len": length}).with_pat("here", on_cpu=False)
        assert of_length["max_model_len"] == 4096


def test_stock_vllm_is_the_same_engine_without_pat() -> None:
    given = {"block_size": 32, "worker_extension_cls": "x.Y", "gpu_memory_utilization": 0.3}
    given |= {"speculative_config": {"method": "ngram"}, "additional_config": {"more": 1}}
    stock = stock_of(Request(2, engine=given).with_pat("here", on_cpu=False), requests=24)
    assert stock == {
        "model": "here",
        "block_size": 32,
        "gpu_memory_utilization": 0.3,
        "additional_config": {"more": 1},
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "seed": 0,
        "skip_tokenizer_init": True,
        "max_num_seqs": 24,
        "kv_cache_memory_bytes": 256 << 20,
    }


def test_some_prompts_are_long() -> None:
    lengths = [len(prompt) for prompt in prompts(512, 256, 2400)]
    assert len(lengths) == 256 and lengths.count(2400) == 8
    assert all(10 <= length <= 40 for length in lengths if length != 2400)
    assert max(len(prompt) for prompt in prompts(512, 256, 30)) == 30


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shape": "huge"}, "--shape 'huge' is not known; allowed: dense, "),
        ({"pat": {"layouts": [3]}}, "tp=3, which does not divide"),
        ({"engine": {"dtype": "auto"}}, "dtype is 'auto'; allowed: float32, bfloat16, float16"),
        (
            {"shape": "window", "engine": {"speculative_config": {"method": "ngram"}}},
            "speculative_config needs another --shape than window",
        ),
        ({"drafter": "eagle3"}, "--drafter is 'eagle3'; allowed: mtp, draft_model"),
        ({"drafter": "mtp"}, "--drafter mtp needs --shape mtp, not dense"),
        (
            {"drafter": "draft_model", "engine": {"speculative_config": {"method": "ngram"}}},
            "--drafter and speculative_config in --engine exclude each other",
        ),
    ],
)
def test_what_no_engine_can_be_made_of_is_refused(given: dict[str, Any], words: str) -> None:
    Request(2).check()
    with pytest.raises(ValueError, match=words):
        Request(2, **given).check()


def test_drafters_with_weights() -> None:
    mtp = Request(2, "mtp", drafter="mtp")
    mtp.check()
    drafts = mtp.with_pat("MODEL", on_cpu=False)["speculative_config"]
    assert drafts == {"method": "mtp", "num_speculative_tokens": 2}
    of_target = Request(2, drafter="draft_model").with_pat("MODEL", on_cpu=False)
    assert of_target["speculative_config"] == {**drafts, "method": "draft_model", "model": "MODEL"}
