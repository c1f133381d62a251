"""What PAT cannot serve is refused at once: before a worker starts, saying what is wrong.

Everything goes through `EngineArgs.create_engine_config`, vLLM's own way from options to a config,
with models that consist of a `config.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import random_model

DENSE = dict(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=2048,
)
VISION = dict(
    model_type="siglip_vision_model",
    hidden_size=64,
    num_attention_heads=4,
    num_hidden_layers=2,
    intermediate_size=128,
    image_size=32,
    patch_size=16,
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(architectures=["LlamaForCausalLM"], model_type="llama", **DENSE),
    "llama_12_3": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        **(DENSE | dict(num_attention_heads=12, num_key_value_heads=3)),
    ),
    "qwen2": dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        sliding_window=128,
        use_sliding_window=False,
        **DENSE,
    ),
    "mamba": dict(
        architectures=["MambaForCausalLM"],
        model_type="mamba",
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=512,
        state_size=16,
        intermediate_size=128,
    ),
    "jamba": dict(architectures=["JambaForCausalLM"], model_type="jamba", **DENSE),
    "mistral": dict(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=128, **DENSE
    ),
    "gemma2": dict(
        architectures=["Gemma2ForCausalLM"], model_type="gemma2", sliding_window=128, **DENSE
    ),
    "mixtral": dict(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        **DENSE,
    ),
    "deepseek": dict(
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        **DENSE,
    ),
    "paligemma": dict(
        architectures=["PaliGemmaForConditionalGeneration"],
        model_type="paligemma",
        text_config=dict(model_type="gemma", **DENSE),
        vision_config=VISION,
    ),
    "whisper": dict(
        architectures=["WhisperForConditionalGeneration"],
        model_type="whisper",
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        vocab_size=512,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    ),
    "bert": dict(architectures=["BertModel"], model_type="bert", **DENSE),
    "quantized": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        quantization_config=dict(
            quant_method="compressed-tensors", format="int-quantized", config_groups={}, ignore=[]
        ),
        **DENSE,
    ),
}

DIRECTORY = str(Path(__file__).parent)
SPREAD = {"kind": "static", "tp": "tp4dp1ep"}
DENSE_ONLY = "decoder-only models with full attention"

NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)

# Model, options, and what the message must name: the option, its value, what is allowed.
REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "data parallelism": (
        "llama",
        dict(data_parallel_size=2),
        ["data_parallel_size=2", "allowed: 1"],
    ),
    "decode context parallelism": (
        "llama",
        dict(tensor_parallel_size=6, decode_context_parallel_size=3),
        ["decode_context_parallel_size=3", "allowed: 1"],
    ),
    "prefill context parallelism": (
        "llama",
        dict(prefill_context_parallel_size=2),
        ["prefill_context_parallel_size=2", "allowed: 1"],
    ),
    "expert parallelism": (
        "mixtral",
        dict(enable_expert_parallel=True),
        ["enable_expert_parallel=True", "allowed: False"],
    ),
    "experts of a model that has none": (
        "llama",
        dict(additional_config={"pat": {"experts": "ep"}}),
        ["pat.experts is 'ep', but the model has no experts"],
    ),
    "whole experts that vLLM packs": (
        "mixtral",
        dict(additional_config={"pat": {"experts": "ep"}}),
        ["pat.experts is 'ep'", "set pat.weights='inplace' or pat.experts='tp'"],
    ),
    "experts in turns": (
        "mixtral",
        dict(enable_expert_parallel=True, expert_placement_strategy="round_robin"),
        ["expert_placement_strategy='round_robin'", "allowed: linear"],
    ),
    "tokens sent to experts": (
        "mixtral",
        dict(all2all_backend="deepep_low_latency"),
        ["all2all_backend='deepep_low_latency'", "allowed: allgather_reducescatter"],
    ),
    "kernels that lay experts out in their way": (
        "mixtral",
        dict(moe_backend="flashinfer_cutlass"),
        ["moe_backend='flashinfer_cutlass'", "allowed: auto, triton"],
    ),
    "batches that overlap": ("mixtral", dict(enable_dbo=True), ["enable_dbo=True"]),
    "experts that are told": (
        "mixtral",
        dict(enable_return_routed_experts=True),
        ["enable_return_routed_experts=True", "layouts cannot replay routing yet"],
    ),
    "layers with different experts": (
        "mixtral",
        dict(
            hf_overrides={
                "num_local_experts": 0,
                "block_configs": [{"block_type": "moe", "n_routed_experts": n} for n in (8, 4)],
            }
        ),
        ["a mixture of experts", "one number of experts and one width for all layers"],
    ),
    "both kinds where no rank has a whole expert": (
        "mixtral",
        dict(
            tensor_parallel_size=4,
            hf_overrides={"num_attention_heads": 8, "num_key_value_heads": 4},
            additional_config={"pat": {"base_tp": 2, "weights": "inplace", "policy": SPREAD}},
        ),
        ["names tp4dp1ep", "with pat.base_tp=2 experts lie in one way in all layouts"],
    ),
    "NUMA nodes by rank": (
        "llama_12_3",
        dict(tensor_parallel_size=12, numa_bind=True, numa_bind_nodes=[0] * 6 + [1] * 6),
        ["numa_bind=True", "allowed: False with 12 ranks", "numactl"],
    ),
    "sampling in shards of the batch": (
        "llama",
        dict(enable_batch_sharded_sampling=True),
        ["enable_batch_sharded_sampling=True", "allowed: False"],
    ),
    "weights in CPU memory": (
        "llama",
        dict(cpu_offload_gb=1.5),
        ["cpu_offload_gb=1.5", "allowed: 0"],
    ),
    "weights that are fetched from CPU memory": (
        "llama",
        dict(offload_group_size=2),
        ["offload_group_size=2", "allowed: 0"],
    ),
    "LoRA": ("llama", dict(enable_lora=True), ["enable_lora=True", "allowed: False"]),
    "draft lengths that are not kept ready": (
        "llama",
        dict(
            speculative_config=NGRAM,
            additional_config=dict(
                pat=dict(
                    policy=dict(kind="schedule", switch_at={4: 2}, num_speculative_tokens={2: 7})
                )
            ),
        ),
        ["num_speculative_tokens", "7 for tp=2", "[0, 1, 2, 3]"],
    ),
    "draft lengths without speculation": (
        "llama",
        dict(
            additional_config=dict(
                pat=dict(
                    policy=dict(kind="schedule", switch_at={4: 2}, num_speculative_tokens={2: 2})
                )
            ),
        ),
        ["pat.policy.num_speculative_tokens", "no speculative_config"],
    ),
    "quantization on the fly": (
        "llama",
        dict(quantization="fp8", dtype="bfloat16"),
        ["quantization='fp8'", "allowed: None (unquantized weights)"],
    ),
    "a quantized checkpoint": (
        "quantized",
        dict(dtype="bfloat16"),
        ["quantization='compressed-tensors'", "allowed: None (unquantized weights)"],
    ),
    "a quantized KV cache": (
        "llama",
        dict(kv_cache_dtype="fp8"),
        ["kv_cache_dtype='fp8'", "allowed: auto, float16, bfloat16, float32"],
    ),
    "an attention backend that packs KV heads": (
        "llama",
        dict(attention_backend="ROCM_ATTN"),
        ["attention_backend='ROCM_ATTN'", "allowed: TRITON_ATTN"],
    ),
    "another KV connector": (
        "llama",
        dict(kv_transfer_config=dict(kv_connector="ExampleConnector", kv_role="kv_both")),
        ["kv_transfer_config=", "ExampleConnector", "allowed: None"],
    ),
    "KV offloading": (
        "llama",
        dict(kv_offloading_size=1.5),
        ["kv_offloading_size=1.5", "allowed: None"],
    ),
    "an encoder connector": (
        "llama",
        dict(ec_transfer_config=dict(ec_connector="ECExampleConnector", ec_role="ec_consumer")),
        ["ec_transfer_config=", "ECExampleConnector", "allowed: None"],
    ),
    "KV events": (
        "llama",
        dict(kv_events_config=dict(enable_kv_cache_events=True, publisher="null")),
        ["kv_events_config=", "enable_kv_cache_events=True", "allowed: None"],
    ),
    "Mamba": ("mamba", {}, ["a hybrid, Mamba or linear-attention model", DENSE_ONLY]),
    "hybrid": ("jamba", {}, ["a hybrid, Mamba or linear-attention model", DENSE_ONLY]),
    "sliding window": (
        "mistral",
        {},
        ["sliding_window=128", "full attention in every layer, or disable_sliding_window=True"],
    ),
    "sliding window in some layers": (
        "gemma2",
        {},
        ["sliding_window=128", "full attention in every layer, or disable_sliding_window=True"],
    ),
    "MLA": ("deepseek", {}, ["a model with multi-head latent attention", DENSE_ONLY]),
    "multimodal": ("paligemma", {}, ["a multimodal model", DENSE_ONLY]),
    "encoder-decoder": (
        "whisper",
        dict(max_model_len=448),
        ["an encoder-decoder model", DENSE_ONLY],
    ),
    "pooling": ("llama", dict(runner="pooling"), ["runner='pooling'", "allowed: generate"]),
    "a pooling model": ("bert", {}, ["runner='pooling'", "allowed: generate"]),
    "a layout that does not divide N": (
        "llama",
        dict(tensor_parallel_size=6, additional_config={"pat": {"layouts": [1, 4]}}),
        ["pat.layouts", "tp=4", "tensor_parallel_size=6", "allowed: [1, 2, 3, 6]"],
    ),
    "a base layout that does not divide N": (
        "llama",
        dict(tensor_parallel_size=6, additional_config={"pat": {"base_tp": 4}}),
        ["pat.base_tp", "tp=4", "tensor_parallel_size=6", "allowed: [1, 2, 3, 6]"],
    ),
    "a layout smaller than the base": (
        "llama",
        dict(additional_config={"pat": {"layouts": [1, 2], "base_tp": 2}}),
        ["pat.layouts", "tp=1", "pat.base_tp=2"],
    ),
    "KV heads that a layout cannot split": (
        "llama_12_3",
        dict(tensor_parallel_size=6),
        ["3 KV heads", "tp=2", "pat.layouts"],
    ),
    "KV heads that a layout cannot replicate": (
        "llama_12_3",
        dict(tensor_parallel_size=4, additional_config={"pat": {"layouts": [1, 4]}}),
        ["3 KV heads", "tp=4", "pat.layouts"],
    ),
    "options that are no dict": (
        "llama",
        dict(additional_config={"pat": 7}),
        ['additional_config["pat"] must be a dict', "got 7", "allowed options: layouts, base_tp"],
    ),
    "an unknown option": (
        "llama",
        dict(additional_config={"pat": {"layout": [1, 2]}}),
        ["unknown option 'layout'", "[1, 2]", "allowed: layouts, base_tp"],
    ),
    "a value of the wrong kind": (
        "llama",
        dict(additional_config={"pat": {"kv_transfer": "move"}}),
        ["'kv_transfer'", "'move'", "'auto', 'migrate' or 'recompute'"],
    ),
    "a policy of no known kind": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "magic"}}}),
        ["'policy'", "magic", "'static', 'schedule'"],
    ),
    "a policy that is no dict": (
        "llama",
        dict(additional_config={"pat": {"policy": "static"}}),
        ["'policy'", "'static'", "valid dictionary"],
    ),
    "a policy with an unknown key": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "static", "tp": 1, "at": 4}}}),
        ["unknown option", "at", "4", "allowed"],
    ),
    "a policy without its table": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "schedule"}}}),
        ["switch_at", "required"],
    ),
    "a policy with a table of the wrong kind": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "schedule", "switch_at": {"few": 2}}}}),
        ["switch_at", "'few'", "integer"],
    ),
    "a policy with an impossible table": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "schedule", "switch_at": {0: 2}}}}),
        ["switch_at", ">= 1", "{0: 2}"],
    ),
    "a policy with a layout that is not kept": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "static", "tp": 3}}}),
        ["pat.policy", "tp=3", "tp1dp2, tp2dp1"],
    ),
    "a profile that is not there": (
        "llama",
        dict(
            additional_config={"pat": {"policy": {"kind": "predictor", "profile": "no/such.json"}}}
        ),
        ["profile no/such.json cannot be read", "No such file"],
    ),
    "a profile that is none": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "predictor", "profile": __file__}}}),
        ["test_bad_input.py is no JSON", "pat-vllm profile"],
    ),
    "a lengths file that is none": (
        "llama",
        dict(
            additional_config={"pat": {"policy": {"kind": "predictor", "lengths_file": __file__}}}
        ),
        ["test_bad_input.py holds no length history", "delete it"],
    ),
    "a lengths file that is a directory": (
        "llama",
        dict(
            additional_config={"pat": {"policy": {"kind": "predictor", "lengths_file": DIRECTORY}}}
        ),
        [f"the lengths file {DIRECTORY} cannot be read", "Is a directory"],
    ),
    "an impossible bound of lengths": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "predictor", "length_bound": 0}}}),
        ["length_bound", "greater than or equal to 1"],
    ),
    "a scheduler_cls": (
        "llama",
        dict(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"),
        ["scheduler_cls='vllm.v1.core.sched.scheduler.Scheduler'", "leave it unset"],
    ),
    "a worker_cls": (
        "llama",
        dict(worker_cls="my.Worker"),
        ["worker_cls='my.Worker'", "leave it at 'auto'", "worker_extension_cls"],
    ),
    "two things at once": (
        "mistral",
        dict(enable_lora=True),
        ["enable_lora=True", "sliding_window=128"],
    ),
}

# What vLLM refuses by itself before PAT is asked: its error, and its words.
REFUSED_BY_VLLM: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "pipeline parallelism": (
        "llama",
        dict(pipeline_parallel_size=2),
        NotImplementedError,
        "Pipeline Parallelism",
    ),
    "several nodes": ("llama", dict(nnodes=2), ValueError, "nnodes > 1"),
    "expert parallelism without experts": (
        "llama",
        dict(enable_expert_parallel=True),
        ValueError,
        "expert parallelism",
    ),
    "N that does not divide the attention heads": (
        "llama",
        dict(tensor_parallel_size=4),
        ValueError,
        r"attention heads \(6\) must be divisible by tensor parallel size \(4\)",
    ),
}

# Near neighbours of what is refused.
ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a lengths file that is not there yet": (
        "llama",
        dict(
            additional_config={
                "pat": {"policy": {"kind": "predictor", "lengths_file": "no/such.json"}}
            }
        ),
    ),
    "n-gram drafts": ("llama", dict(speculative_config=NGRAM)),
    "a dense model": ("llama", {}),
    "KV heads that layouts replicate": (
        "llama",
        dict(tensor_parallel_size=6, additional_config={"pat": {"layouts": [1, 2, 6]}}),
    ),
    "an odd number of ranks": ("llama_12_3", dict(tensor_parallel_size=3)),
    "NUMA nodes by rank, where rank r has GPU r": ("llama", dict(numa_bind=True)),
    "a sliding window that the model does not use": ("qwen2", {}),
    "a disabled sliding window": (
        "mistral",
        dict(disable_sliding_window=True, max_model_len=128),
    ),
    "KV events switched off": (
        "llama",
        dict(kv_events_config=dict(enable_kv_cache_events=False)),
    ),
    "a worker extension": ("llama", dict(worker_extension_cls="my.Extension")),
    "a schedule": (
        "llama",
        dict(additional_config={"pat": {"policy": {"kind": "schedule", "switch_at": {"4": 2}}}}),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def inspect_here() -> Any:
    """vLLM looks at each new model class in a process of its own, which takes 8 s."""
    import vllm.model_executor.models.registry as registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda fn: fn())
        yield


def engine_options(directory: Path, model: str, options: dict[str, Any]) -> dict[str, Any]:
    (directory / "config.json").write_text(json.dumps(MODELS[model]))
    return {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "dtype": "float32",
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "pat",
        **options,
    }


def engine_config(directory: Path, model: str, options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_options(directory, model, options)).create_engine_config()


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    """The error names the option, its value and what is allowed."""
    model, options, words = REFUSED[case]
    with pytest.raises(ValueError) as error:
        engine_config(tmp_path, model, options)
    message = str(error.value)
    assert not [word for word in words if word not in message], message


def test_experts_that_move_are_refused(tmp_path: Path) -> None:
    """On CPU vLLM refuses them itself."""
    from pat_vllm.support import _unsupported_experts

    config = engine_config(tmp_path, "mixtral", {})
    parallel = config.parallel_config
    parallel.enable_eplb = parallel.enable_elastic_ep = True
    parallel.eplb_config.num_redundant_experts = 4
    found = {option: (value, allowed) for option, value, allowed in _unsupported_experts(config)}
    stay = "a layout's experts stay where they are"
    assert found == {
        "enable_eplb": (True, f"False: {stay}"),
        "num_redundant_experts": (4, f"0: {stay}"),
        "enable_elastic_ep": (True, f"False: {stay}"),
    }


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "suffix", "medusa"])
def test_drafters_with_weights_or_state_are_refused(method: str, tmp_path: Path) -> None:
    """By name, with what is allowed. vLLM's own config of each needs files that are not here."""
    from vllm.v1.executor.abstract import Executor

    config = engine_config(tmp_path, "llama", dict(speculative_config=NGRAM))
    config.speculative_config.method = method
    words = rf"speculative_config.method='{method}' \(allowed: ngram, ngram_gpu"
    with pytest.raises(ValueError, match=words):
        Executor.get_class(config)


def test_a_startup_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    with pytest.raises(ValueError, match=r"VLLM_ENABLE_STARTUP_PLAN=1 \(allowed: 0"):
        engine_config(tmp_path, "llama", {})


@pytest.mark.parametrize("case", REFUSED_BY_VLLM)
def test_refused_by_vllm(case: str, tmp_path: Path) -> None:
    model, options, error, words = REFUSED_BY_VLLM[case]
    with pytest.raises(error, match=words):
        engine_config(tmp_path, model, options)


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case: str, tmp_path: Path) -> None:
    """The refusals above are due to their option, and go no further than they must."""
    model, options = ACCEPTED[case]
    config = engine_config(tmp_path, model, options)
    assert config.scheduler_config.scheduler_cls == "pat_vllm.scheduler.scheduler.PATScheduler"
    assert config.parallel_config.worker_cls == "pat_vllm.worker.cpu_worker.PATCPUWorker"


def test_pipeline_parallelism_set_later(tmp_path: Path) -> None:
    """PAT refuses it too, where a config does not come from `EngineArgs`."""
    from vllm.v1.executor.abstract import Executor

    config = engine_config(tmp_path, "llama", {})
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2 \(allowed: 1"):
        Executor.get_class(config)


@pytest.mark.parametrize("model", ["MixtralForCausalLM", "LlamaForCausalLM"])
def test_other_backends_refuse_nothing(model: str, tmp_path: Path) -> None:
    """What PAT cannot serve still works with vLLM's own executor."""
    name = {"MixtralForCausalLM": "mixtral", "LlamaForCausalLM": "llama"}[model]
    options = dict(distributed_executor_backend="mp", additional_config={"pat": {"unknown": 1}})
    config = engine_config(tmp_path, name, options)
    assert config.model_config.architectures == [model]
    assert config.scheduler_config.scheduler_cls is None


def test_llm_fails_before_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through `LLM`: the error is the caller's, and no process was started."""
    import multiprocessing.process as process

    from vllm import LLM

    def start(self: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(process.BaseProcess, "start", start)
    options = dict(distributed_executor_backend="pat", tensor_parallel_size=2, dtype="float32")
    with pytest.raises(ValueError, match=r"enable_lora=True \(allowed: False\)"):
        LLM(str(random_model("qwen3")), enable_lora=True, **options)
    with pytest.raises(ValueError, match="unknown option 'policies'"):
        LLM(str(random_model("qwen3")), additional_config={"pat": {"policies": []}}, **options)
