"""What PAT cannot serve is refused at once: before a worker starts, saying what is wrong.

Everything goes through `EngineArgs.create_engine_config`, vLLM's own way from options to a config,
with models that consist of a `config.json`. What is wrong with PAT's own options alone is in
tests/unit/test_config.py.
"""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pat_vllm.start import prepare as support
from pat_vllm.start.refused import RULES
from pat_vllm.start.setup import options_of
from tests.support.models import random_model

# fmt: off
DENSE = dict(
    hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, vocab_size=512, max_position_embeddings=2048,
)


def model(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **DENSE, **fields}


MODELS: dict[str, dict[str, Any]] = {
    "llama": model("LlamaForCausalLM", "llama"),
    "llama_12_3": model(
        "LlamaForCausalLM", "llama", num_attention_heads=12, num_key_value_heads=3
    ),
    "qwen2": model("Qwen2ForCausalLM", "qwen2", sliding_window=128, use_sliding_window=False),
    "mamba": model("MambaForCausalLM", "mamba", state_size=16),
    "mistral": model("MistralForCausalLM", "mistral", sliding_window=128),
    "mixtral": model("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    "deepseek": model(
        "DeepseekV2ForCausalLM", "deepseek_v2", kv_lora_rank=16, q_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    ),
    "paligemma": model(
        "PaliGemmaForConditionalGeneration", "paligemma",
        text_config=dict(model_type="gemma", **DENSE),
        vision_config=dict(
            model_type="siglip_vision_model", hidden_size=64, num_attention_heads=4,
            num_hidden_layers=2, intermediate_size=128, image_size=32, patch_size=16,
        ),
    ),
    "qwen_vl": model(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", text_config=dict(
            model_type="qwen2_5_vl_text", **DENSE,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]),
        ),
        vision_config=dict(model_type="qwen2_5_vl", hidden_size=32, depth=1, num_heads=4,
                           intermediate_size=64, out_hidden_size=48),
        image_token_id=500, video_token_id=501,
    ),
    "whisper": dict(
        architectures=["WhisperForConditionalGeneration"], model_type="whisper", d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        vocab_size=512, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    ),
    "mxfp4": model(
        "GptOssForCausalLM", "gpt_oss", num_local_experts=4, num_experts_per_tok=2,
        quantization_config=dict(quant_method="mxfp4"),
    ),
    "next": model(
        "Qwen3NextForCausalLM", "qwen3_next", head_dim=32, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_key_heads=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "nemotron": model(
        "NemotronHForCausalLM", "nemotron_h", head_dim=32, n_groups=2, mamba_num_heads=4,
        mamba_head_dim=64, ssm_state_size=64, hybrid_override_pattern="M-*",
    ),
    "scales of heads": model("LlamaForCausalLM", "llama", quantization_config=dict(
        quant_method="compressed-tensors", format="float-quantized", config_groups={}, ignore=[],
        kv_cache_scheme=dict(num_bits=8, type="float", strategy="attn_head"),
    )),
    "quantized": model("LlamaForCausalLM", "llama", quantization_config=dict(
        quant_method="awq", bits=4, group_size=32, zero_point=True
    )),
}
MOE_OF_TWO_SIZES = {
    "num_local_experts": 0,
    "block_configs": [{"block_type": "moe", "n_routed_experts": n} for n in (8, 4)],
}
DENSE_ONLY = "decoder-only models with full, sliding or latent attention"
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)

# Model, an option of vLLM's, its value, what is allowed, and other options that belong to it.
OPTIONS: list[tuple[str, str, Any, str, dict[str, Any]]] = [
    ("llama", "data_parallel_size", 2, "1", {}),
    ("llama", "decode_context_parallel_size", 3, "1", dict(tensor_parallel_size=6)),
    ("llama", "prefill_context_parallel_size", 2, "1", {}),
    ("llama", "enable_batch_sharded_sampling", True, "False", {}),
    ("llama_12_3", "numa_bind", True, "False with 12 ranks",
     dict(tensor_parallel_size=12, numa_bind_nodes=[0] * 6 + [1] * 6)),
    ("mixtral", "enable_expert_parallel", True, "False", {}),
    ("mixtral", "expert_placement_strategy", "round_robin", "linear",
     dict(enable_expert_parallel=True)),
    ("mixtral", "moe_backend", "cutlass", "auto, triton, flashinfer_cutlass", {}),
    ("llama", "cpu_offload_gb", 1.5, "0", {}),
    ("llama", "enable_lora", True, "False", {}),
    ("llama", "quantization", "mxfp8", "None, fp8, ", dict(dtype="bfloat16")),
    ("llama", "kv_cache_dtype", "fp8_per_token_head",
     "auto, float16, bfloat16, float32, fp8, fp8_e4m3, fp8_e5m2)", {}),
    ("llama", "kv_cache_dtype_skip_layers", ["1"], "[], with KV in fp8",
     dict(kv_cache_dtype="fp8")),
    ("llama", "attention_backend", "ROCM_ATTN", "TRITON_ATTN", {}),
    ("llama", "attention_backend", "HPC_ATTN", "TRITON_ATTN", {}),
    ("llama", "kv_offloading_size", 1.5, "None", {}),
    ("llama", "runner", "pooling", "generate", {}),
    ("next", "prefix_match_unit", 16, "None", {}),
    ("qwen_vl", "mm_processor_cache_type", "shm", "lru", {}),
    ("qwen_vl", "mm_ipc_gpu_memory_gb", 1, "0", {}),
    ("qwen_vl", "mm_encoder_only", True, "False", {}),
    ("qwen_vl", "mm_encoder_attn_dtype", "fp8", "None", {}),
    ("qwen_vl", "video_pruning_rate", 0.5, "None, 0; positions", {}),
]
# The same of options that are whole configs, and of models: what the message names.
CONFIGS_AND_MODELS: list[tuple[str, dict[str, Any], str, str]] = [
    ("llama", dict(kv_transfer_config=dict(kv_connector="ExampleConnector", kv_role="kv_both")),
     "kv_transfer_config=", "None"),
    ("llama", dict(kv_events_config=dict(enable_kv_cache_events=True, publisher="null")),
     "kv_events_config=", "None"),
    ("quantized", dict(dtype="bfloat16"), "quantization='awq'", "None, fp8, "),
    ("scales of heads", dict(dtype="bfloat16"), "kv_cache_scheme.strategy='attn_head'",
     "tensor)"),
    ("mxfp4", dict(dtype="bfloat16"), "quantization='gpt_oss_mxfp4'",
     "None, fp8, "),
    ("mamba", {}, "a hybrid or Mamba model, but for Gated DeltaNet and Nemotron-H's Mamba2",
     "Gated DeltaNet, of Qwen3-Next and Qwen3.5, and Mamba2, of Nemotron-H"),
    ("deepseek", dict(hf_overrides=dict(index_topk=16)), "a model with sparse attention",
     DENSE_ONLY),
    ("paligemma", {}, "language_model_only=False", "True, of a class with a vision tower"),
    ("paligemma", dict(language_model_only=True, enable_mm_embeds=True), "enable_mm_embeds=True",
     "False"),
    ("qwen_vl", dict(mm_processor_kwargs=dict(device="cuda")), "mm_processor_device='cuda'",
     "cpu: layouts count"),
    ("whisper", dict(max_model_len=448), "an encoder-decoder model", DENSE_ONLY),
    ("mixtral", dict(hf_overrides=MOE_OF_TWO_SIZES), "a mixture of experts",
     "models whose config has one number of experts and one width for all layers"),
]
# The same where vLLM refuses an option itself on CPU, or needs files for it: the option, what is
# set in a config, to what, and what is allowed.
SET: list[tuple[str, str, str, Any, str]] = [
    ("llama", "pipeline_parallel_size", "parallel_config.pipeline_parallel_size", 2, "1"),
    ("llama", "nnodes", "parallel_config.nnodes", 2, "1"),
    ("llama", "offload_group_size", "offload_config.prefetch.offload_group_size", 2, "0"),
    ("llama", "enable_fault_tolerance", "parallel_config.enable_fault_tolerance", True,
     "False: a core that has failed would wait for orders"),
    ("llama", "ec_transfer_config", "ec_transfer_config", "a config", "None"),
    ("llama", "watermark_config", "watermark_config", "a config", "None"),
    ("llama", "enable_trace_replay", "model_config.enable_trace_replay", True, "False"),
    ("llama", "weight_transfer_config.backend", "weight_transfer_config.backend", "sharded_rdt",
     "nccl, ipc"),
    ("llama", "speculative_config.method", "speculative_config.method", "medusa",
     "ngram, ngram_gpu; from vLLM 0.32 on also mtp, "),
    ("llama", "speculative_config.rejection_sample_method",
     "speculative_config.rejection_sample_method", "fly", "standard, block"),
    ("next", "speculative_config", "speculative_config",
     SimpleNamespace(method="ngram", rejection_sample_method="standard"), "ngram_gpu, mtp, eagle3"),
    ("next", "mamba_cache_mode", "cache_config.mamba_cache_mode", "all", "none, align"),
    ("next", "use_replayssm", "cache_config.use_replayssm", True, "False: layouts cannot share"),
    ("qwen_vl", "cudagraph_mm_encoder", "compilation_config.cudagraph_mm_encoder", True, "False"),
    ("qwen_vl", "compile_mm_encoder", "compilation_config.compile_mm_encoder", True, "False"),
    ("qwen_vl", "ec_manager_config", "ec_manager_config.encoder_cache_manager_cls", "my.Manager",
     "None: a switch empties"),
    ("mixtral", "enable_eplb", "parallel_config.enable_eplb", True, "False"),
    ("mixtral", "num_redundant_experts", "parallel_config.eplb_config.num_redundant_experts", 4,
     "0"),
    ("mixtral", "enable_elastic_ep", "parallel_config.enable_elastic_ep", True, "False"),
    ("mixtral", "all2all_backend", "parallel_config.all2all_backend", "deepep_low_latency",
     "allgather_reducescatter"),
    ("mixtral", "enable_dbo", "parallel_config.enable_dbo", True, "False"),
    ("mixtral", "enable_return_routed_experts", "aux_output_config.enable_return_routed_experts",
     True, "False"),
]
# What a drafter with weights may not be: what is set in `speculative_config`, to what.
DRAFTERS: list[tuple[str, Any, str]] = [
    ("model", SimpleNamespace(hf_config=SimpleNamespace(model_type="gemma4_mtp")),
     "a drafter whose KV"),
    ("quantization", SimpleNamespace(quantization="fp8"), "None: layouts cannot"),
    ("num_speculative_tokens",
     SimpleNamespace(hf_config=SimpleNamespace(model_type="mimo_mtp", num_nextn_predict_layers=2)),
     "1, of a model with"),
    ("max_model_len", 8, "at least max_model_len"),
    ("draft_load_config", "a config", "None: a drafter"),
    ("attention_backend", "FLASH_ATTN", "None: a drafter"),
    ("kv_cache_dtype", "fp8", "None: a drafter"),
    ("moe_backend", "triton", "None: a drafter"),
    ("parallel_drafting", True, "False"),
    ("enable_adaptive_verification", True, "False"),
    ("use_heterogeneous_vocab", True, "False"),
    ("draft_sample_method", "probabilistic", "greedy"),
]
VARIABLES = ["VLLM_ENABLE_STARTUP_PLAN", "VLLM_USE_NCCL_SYMM_MEM"]


def pat(**options: Any) -> dict[str, Any]:
    return dict(additional_config={"pat": options})


def predictor(**options: Any) -> dict[str, Any]:
    return pat(policy={"kind": "predictor", **options})


def draft_lengths(length: int) -> dict[str, Any]:
    return pat(policy=dict(kind="schedule", switch_at={4: 2}, num_speculative_tokens={2: length}))


EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
# What does not go with the model or with other options, or is not on the disk; its message's words.
UNSUITABLE: list[tuple[str, dict[str, Any], list[str]]] = [
    # vLLM packs experts for its CPU kernels, which run cut ones only.
    ("mixtral", pat(experts="ep"),
     ["pat.experts", "'ep'", "pat.weights='inplace'", "pat.experts='tp'"]),
    ("mixtral", dict(tensor_parallel_size=8, hf_overrides=EIGHT_HEADS,
                     **pat(experts="ep", weights="inplace", layouts=[8])),
     ["pat.experts='ep'", "4 experts cannot be spread over 8 ranks", "pat.layouts"]),
    ("llama", pat(experts="ep"), ["pat.experts is 'ep'", "no experts", "'auto'"]),
    ("llama", dict(speculative_config=NGRAM, **draft_lengths(7)),
     ["num_speculative_tokens", "7 for tp=2", "[0, 1, 2, 3]"]),
    ("llama", draft_lengths(2), ["pat.policy.num_speculative_tokens", "no speculative_config"]),
    # Heads that a layout cannot split, and that it cannot replicate.
    ("llama_12_3", dict(tensor_parallel_size=6, **pat(layouts=[1, 2, 6])),
     ["3 KV heads", "tp=2", "pat.layouts"]),
    ("llama_12_3", dict(tensor_parallel_size=4, **pat(layouts=[1, 4])),
     ["3 KV heads", "tp=4", "pat.layouts"]),
    ("next", dict(tensor_parallel_size=4, hf_overrides=EIGHT_HEADS, **pat(layouts=[1, 4])),
     ["2 key heads", "tp=4", "pat.layouts"]),
    ("nemotron", dict(tensor_parallel_size=4, hf_overrides=EIGHT_HEADS, **pat(layouts=[1, 4])),
     ["2 key heads (of Mamba2 groups, which vLLM would copy)", "tp=4", "pat.layouts"]),
    ("llama", predictor(profile="no/such.json"), ["profile no/such.json", "No such file"]),
    ("llama", predictor(profile=__file__), ["test_bad_input.py is no JSON", "pat-vllm profile"]),
    ("llama", dict(scheduler_cls="my.Scheduler"),
     ["scheduler_cls='my.Scheduler'", "leave it unset"]),
    ("llama", dict(worker_cls="my.Worker"),
     ["worker_cls='my.Worker'", "leave it at 'auto'", "worker_extension_cls"]),
    ("mamba", dict(cpu_offload_gb=1.5), ["cpu_offload_gb=1.5", "a hybrid or Mamba"]),
]

# Near neighbours of what is refused.
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", pat(state_dir="no/such")),  # it will be made
    ("llama", pat(state_dir=__file__)),  # the engine core will warn
    ("llama", dict(speculative_config=NGRAM)),
    *(("llama", dict(kv_cache_dtype=dtype)) for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")),
    ("llama", dict(kv_cache_dtype_skip_layers=["1"])),
    # KV heads that layouts replicate; NUMA nodes by rank, where rank r has GPU r.
    ("llama", dict(tensor_parallel_size=6, **pat(layouts=[1, 2, 6]))),
    ("llama", dict(numa_bind=True)),
    # A sliding window, one that the model does not use, and one that is disabled.
    ("mistral", {}),
    ("qwen2", {}),
    # Linear attention, with prefix caching and without.
    ("next", {}),
    ("next", dict(enable_prefix_caching=False)),
    # And Mamba2; sizes of experts, which transformers gives its config, are of none.
    ("nemotron", {}),
    ("nemotron", dict(enable_prefix_caching=False, enable_expert_parallel=True)),
    ("mistral", dict(disable_sliding_window=True, max_model_len=128)),
    # Text alone of a class for images, by either option of vLLM's.
    ("paligemma", dict(language_model_only=True)),
    ("paligemma", dict(limit_mm_per_prompt=dict(image=0))),
    # Images of a class that is served with them, and what only they refuse beside text alone.
    ("qwen_vl", {}),
    ("qwen_vl", dict(mm_encoder_tp_mode="weights", limit_mm_per_prompt=dict(image=2, video=0))),
    ("qwen_vl", dict(language_model_only=True, mm_processor_cache_type="shm")),
    ("llama", dict(kv_events_config=dict(enable_kv_cache_events=False))),
    ("llama", dict(worker_extension_cls="my.Extension")),
]
# fmt: on


@pytest.fixture(scope="module", autouse=True)
def inspect_here() -> Any:
    """vLLM looks at each new model class in a process of its own, which takes 8 s."""
    import vllm.model_executor.models.registry as registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda fn: fn())
        yield


def engine_config(directory: Path, model: str, options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    (directory / "config.json").write_text(json.dumps(MODELS[model]))
    defaults: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "dtype": "float32",
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "pat",
    }
    return EngineArgs(**defaults | options).create_engine_config()


def refusal(directory: Path, model: str, options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        engine_config(directory, model, options)
    return str(error.value)


REFUSED = [
    *(
        (model, {option: value, **more}, f"{option}={value!r}", allowed)
        for model, option, value, allowed, more in OPTIONS
    ),
    *CONFIGS_AND_MODELS,
]


@pytest.mark.parametrize("model, options, named, allowed", REFUSED, ids=lambda v: str(v)[:50])
def test_unsupported_options_and_models(
    model: str, options: dict[str, Any], named: str, allowed: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, model, options)
    assert message.partition(named)[2].partition("(allowed: ")[2].startswith(allowed), message


@pytest.mark.parametrize("model, options, words", UNSUITABLE, ids=lambda value: str(value)[:50])
def test_what_does_not_suit(
    model: str, options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    message = refusal(tmp_path, model, options)
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize("model, options", ACCEPTED, ids=lambda value: str(value)[:50])
def test_accepted(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The refusals above are due to their option, and go no further than they must."""
    config = engine_config(tmp_path, model, options)
    assert config.scheduler_config.scheduler_cls == "pat_vllm.scheduler.scheduler.PATScheduler"
    assert config.parallel_config.worker_cls == "pat_vllm.worker.cpu_worker.PATCPUWorker"
    if config.model_config.supports_multimodal_inputs:  # every rank has the tower whole
        assert config.model_config.multimodal_config.mm_encoder_tp_mode == "data"


@pytest.mark.parametrize("model, option, path, value, allowed", SET)
def test_what_a_config_says_that_vllms_options_cannot_here(
    model: str, option: str, path: str, value: Any, allowed: str, tmp_path: Path
) -> None:
    from vllm.v1.executor.abstract import Executor

    config = engine_config(
        tmp_path, model, dict(speculative_config=NGRAM) if model == "llama" else {}
    )
    config.weight_transfer_config = SimpleNamespace(backend="nccl")
    *parts, last = path.split(".")
    setattr(reduce(getattr, parts, config), last, value)
    with pytest.raises(ValueError) as error:
        Executor.get_class(config)
    said = getattr(value, "method", value)
    assert f" {option}={said!r} (allowed: {allowed}" in str(error.value)


@pytest.mark.parametrize("option, value, allowed", DRAFTERS, ids=lambda value: str(value)[:30])
def test_drafters_with_weights(option: str, value: Any, allowed: str, tmp_path: Path) -> None:
    from vllm.v1.executor.abstract import Executor

    config = engine_config(tmp_path, "llama", dict(speculative_config=NGRAM))
    speculative: Any = config.speculative_config
    speculative.method = "mtp"
    plain = dict(quantization=None, hf_config=SimpleNamespace(model_type="mimo_mtp"))
    speculative.draft_model_config = SimpleNamespace(**plain)
    if isinstance(value, SimpleNamespace):  # of the drafter's model
        vars(speculative.draft_model_config).update(vars(value))
    else:
        setattr(speculative, option, value)
    with pytest.raises(ValueError) as error:
        Executor.get_class(config)
    message = str(error.value)
    assert f" speculative_config.{option}=" in message, message
    said = message.partition(f"speculative_config.{option}=")[2]
    assert said.partition(" (allowed: ")[2].startswith(allowed), message


@pytest.mark.parametrize(
    "method, states, v2, served",
    [
        ("ngram_gpu", False, True, True),
        ("mtp", False, True, True),
        ("draft_model", False, True, True),
        ("draft_model", True, True, False),
        ("ngram", False, True, False),
        ("ngram_gpu", False, False, False),
    ],
)
def test_drafts_of_linear_attention(method: str, states: bool, v2: bool, served: bool) -> None:
    """Beside those of the target, a drafter's own states would be left where drafts put them."""
    (rule,) = (rule for rule in RULES if rule.name == "speculative_config")
    drafter = SimpleNamespace(has_inner_state=states)
    speculative = SimpleNamespace(method=method, use_ngram=None, draft_model_config=drafter)
    config: Any = SimpleNamespace(use_v2_model_runner=v2, speculative_config=speculative)
    assert rule.refused(config) == (None if served else method)


@pytest.mark.parametrize("variable", VARIABLES)
def test_environment_variables(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert f"{variable}=1 (allowed: 0" in refusal(tmp_path, "llama", {})


def test_cards_are_not_mapped_to_gpus_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = "0000:01:00.0=0000:02:00.0"
    monkeypatch.setenv("VLLM_GPU_NIC_PCIE_MAPPING", mapping)
    engine_config(tmp_path, "llama", {})
    ranks = dict(tensor_parallel_size=12)
    expected = f"VLLM_GPU_NIC_PCIE_MAPPING={mapping!r} (allowed: unset with 12 ranks"
    assert expected in refusal(tmp_path, "llama_12_3", ranks)


def test_form_of_linear_attentions_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert "VLLM_SSM_CONV_STATE_LAYOUT='DS' (allowed: SD" in refusal(tmp_path, "next", {})
    engine_config(tmp_path, "llama", {})


def test_every_rule_has_a_case() -> None:
    """And each of a mixture, or of linear attention, is one of those only, as `RULES` says."""
    of_option = {option: model for model, option, *_ in (*OPTIONS, *SET)}
    of_named = {named.partition("=")[0]: model for model, _, named, _ in CONFIGS_AND_MODELS}
    models = {**of_option, **of_named, **dict.fromkeys(VARIABLES, "llama")}
    models.update({f"speculative_config.{option}": "llama" for option, *_ in DRAFTERS})
    models["VLLM_SSM_CONV_STATE_LAYOUT"] = "next"
    models["VLLM_GPU_NIC_PCIE_MAPPING"] = "llama_12_3"
    names = [rule.name for rule in RULES]
    assert sorted(names) == sorted(models)
    assert {rule.name for rule in RULES if rule.mixtures} == {
        name for name, model in models.items() if model == "mixtral"
    }
    assert {rule.name for rule in RULES if rule.linear} == {
        name for name, model in models.items() if model == "next"
    }


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "flashinfer_trtllm", "aiter"])
def test_kernels_whose_place_others_take(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes that name them run, with a warning that says what it costs."""
    from vllm.platforms import current_platform

    warnings: list[str] = []
    monkeypatch.setattr(support.logger, "warning", lambda text, *of: warnings.append(text % of))
    config = engine_config(tmp_path, "mixtral", dict(moe_backend=backend))
    assert config.kernel_config.moe_backend == "auto"
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda platform: True)
    for named in (backend, "auto"):
        config.kernel_config.moe_backend = named
        support._choose_experts(config, options_of(config))
        assert config.kernel_config.moe_backend == "triton"
    assert len(warnings) == 2 and all(f"moe_backend={backend!r}" in line for line in warnings)
    assert "'triton' takes its place. It costs time" in warnings[1]


def test_packed_copies_hold_cut_experts(tmp_path: Path) -> None:
    assert options_of(engine_config(tmp_path, "mixtral", {})).experts == "tp"


def test_llm_fails_before_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through `LLM`: the error is the caller's, and no process was started."""
    import multiprocessing.process as process

    from vllm import LLM

    def start(self: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(process.BaseProcess, "start", start)
    options = dict(distributed_executor_backend="pat", tensor_parallel_size=2, dtype="float32")
    for wrong, named in (
        (dict(enable_lora=True), "enable_lora=True"),
        (pat(policies=[]), "unknown option 'policies'"),
    ):
        with pytest.raises(ValueError, match=named):
            LLM(str(random_model("qwen3")), **options, **wrong)
