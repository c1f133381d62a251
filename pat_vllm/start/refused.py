"""What PAT refuses of vLLM's options: `RULES`, and how a config is held against them and the
rules about models (`model_rules.py`).

docs/limits.md has the same table for users (`tests/unit/test_docs.py`), and each rule has a case in
`tests/vllm/start/test_bad_input.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pat_vllm.layout import device_of
from pat_vllm.models.drafters import METHODS, OF_TEXT, OF_WEIGHTS, has_weights
from pat_vllm.models.images import SERVED, takes_images
from pat_vllm.models.layer_sizes import fields_of, linear_heads, may_have_experts
from pat_vllm.models.model_rules import (
    KINDS_OF_MODELS,
    KV_SCALE,
    QUANTIZATION,
    RUNNER,
    ModelFacts,
    ModelRule,
    Refused,
)
from pat_vllm.models.quantization import FP8_KV, kv_scale_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

_PACKED_HEADS = frozenset({"ROCM_ATTN", "ROCM_SEGMENTED_ATTN", "B12X"})
"""vLLM's attention backends that pack all KV heads of a block together, so that its bytes cannot be
divided among blocks with fewer heads. The workers refuse others like them when they see the KV."""

_DRAFTERS_WITH_STATE = frozenset({"gemma4_mtp", "step3p5_mtp", "inkling_mtp", "deepseek_v4_mtp"})
"""Types of drafters' models that read the target's KV, or keep other states than it."""

RUN_BY_TRITON = ("flashinfer_cutlass", "flashinfer_trtllm", "aiter")
"""Values of `moe_backend` for unquantized experts in whose place PAT has Triton's kernels run."""


@dataclass(frozen=True)
class Rule:
    """An option of vLLM's, or a kind of model, that PAT does not serve.

    Attributes:
        option: as users know it.
        refused: the option's value in a config if it is refused, else None.
        allowed: what is allowed, and why or what to do instead. "{ranks}" stands for the number of
            the engine's ranks.
        kind: which models a rule about models is about; "" for a rule about an option.
        mixtures: whether the rule holds for mixtures of experts only.
        linear: whether the rule holds for models with linear attention only.
    """

    option: str
    refused: Callable[[VllmConfig], Any]
    allowed: str
    kind: str = ""
    mixtures: bool = False
    linear: bool = False

    @property
    def name(self) -> str:
        """The option, or the kind of model. No two rules have the same."""
        return self.kind or self.option


def unsupported(vllm_config: VllmConfig) -> Refused:
    """The options that PAT cannot serve: the name and value of each, and what is allowed."""
    ranks = vllm_config.parallel_config.world_size
    model = facts_of(vllm_config.model_config) if vllm_config.model_config is not None else None
    is_mixture = model is not None and model.is_mixture
    is_linear = model is not None and linear_heads(model.fields) > 0
    return [
        (rule.option, value, rule.allowed.format(ranks=ranks))
        for rule in RULES
        if (is_mixture or not rule.mixtures)
        and (is_linear or not rule.linear)
        and (value := rule.refused(vllm_config)) is not None
    ]


def _at(vllm_config: VllmConfig, path: str) -> Any:
    """The value at a path of attributes; None where a part of the path is None."""
    value: Any = vllm_config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _other_than(path: str, *served: Any) -> Callable[[VllmConfig], Any]:
    """Refuse what is set at a path and is none of these values."""

    def refused(vllm_config: VllmConfig) -> Any:
        value = _at(vllm_config, path)
        return None if value in served else value

    return refused


def _equal(path: str, value: Any) -> Callable[[VllmConfig], Any]:
    """Refuse this value at a path."""
    return lambda vllm_config: value if _at(vllm_config, path) == value else None


def _only(path: str, *served: Any, why: str = "", option: str = "", **kind: Any) -> Rule:
    """Refuse all but these values at a path of attributes, which ends with the option's name.

    Args:
        option: its name, where the path ends with another.
        kind: fields of `Rule`.
    """
    allowed = ", ".join(map(str, served)) or "None"
    return Rule(
        option or path.rpartition(".")[2],
        _other_than(path, *served),
        f"{allowed}: {why}" if why else allowed,
        **kind,
    )


def _variable(name: str, served: Any, why: str = "", **kind: Any) -> Rule:
    """Refuse all but this value of an environment variable of vLLM's."""

    def refused(vllm_config: VllmConfig) -> Any:
        import vllm.envs as envs

        value = getattr(envs, name)
        value = int(value) if isinstance(value, bool) else value  # as it was given
        return None if value == served else value

    return Rule(name, refused, f"{served}: {why}" if why else f"{served}", **kind)


def _numa_bind(vllm_config: VllmConfig) -> Any:
    """True where `numa_bind` is set and wrong: vLLM binds rank r to the NUMA node of GPU r."""
    return True if vllm_config.parallel_config.numa_bind and _moves_ranks(vllm_config) else None


def _nic_mapping(vllm_config: VllmConfig) -> Any:
    """The mapping, where it is wrong: vLLM gives rank r the network card of GPU r, before PAT gives
    the rank its GPU."""
    import vllm.envs as envs

    mapping = getattr(envs, _NIC_MAPPING, "")  # 0.31 has none
    return mapping if mapping and _moves_ranks(vllm_config) else None


def _moves_ranks(vllm_config: VllmConfig) -> bool:
    """Whether PAT runs some rank on a GPU of another index than the rank's (`device_of`)."""
    ranks = vllm_config.parallel_config.world_size
    return any(device_of(rank, ranks) != rank for rank in range(ranks))


def _lora(vllm_config: VllmConfig) -> Any:
    return None if vllm_config.lora_config is None else True


def _kv_events(vllm_config: VllmConfig) -> Any:
    events = vllm_config.kv_events_config
    return events if events is not None and events.enable_kv_cache_events else None


def _attention_backend(vllm_config: VllmConfig) -> Any:
    """The backend's name if layouts cannot share its KV. `HPC_ATTN` finds its buffers by a layer's
    name, which is the same in the models of all layouts."""
    backend = vllm_config.attention_config.backend
    if backend is not None and (backend.name in _PACKED_HEADS or backend.name == "HPC_ATTN"):
        return backend.name
    return None


def _layers_of_two_dtypes(vllm_config: VllmConfig) -> Any:
    """The layers that keep their KV in the model's type while others keep it in 8 bits."""
    cache = vllm_config.cache_config
    skipped = cache.kv_cache_dtype_skip_layers
    return skipped if skipped and cache.cache_dtype in FP8_KV else None


def _drafts(vllm_config: VllmConfig) -> Any:
    """The method of drafts, if PAT does not serve it with this vLLM."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method is None:
        return None
    served = METHODS if _from_0_32_on(speculative) else OF_TEXT
    return None if speculative.method in served else speculative.method


def _from_0_32_on(speculative: SpeculativeConfig) -> bool:
    """Whether this vLLM is not 0.31, which has other drafters, and no such method."""
    return hasattr(speculative, "use_ngram")


def _drafts_of_linear(vllm_config: VllmConfig) -> Any:
    """The method of drafts, if PAT does not carry the states that they leave, or a drafter has."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method is None:
        return None
    drafter = speculative.draft_model_config if has_weights(speculative) else None
    has_states = drafter is not None and drafter.has_inner_state
    use_v2 = vllm_config.use_v2_model_runner and _from_0_32_on(speculative)
    served = use_v2 and speculative.method in ("ngram_gpu", *OF_WEIGHTS) and not has_states
    return None if served else speculative.method


def _of_drafter(option: str, served: Any, allowed: str) -> Rule:
    """Refuse all but a value of an option in `speculative_config`, of drafters with weights."""

    def refused(vllm_config: VllmConfig) -> Any:
        speculative = vllm_config.speculative_config
        value = getattr(speculative, option, served) if has_weights(speculative) else served
        return None if value == served else value

    return Rule(f"speculative_config.{option}", refused, allowed)


def _quantized_drafter(vllm_config: VllmConfig) -> Any:
    """The quantization of a drafter, which is the target's for MTP and the checkpoint's else."""
    if not has_weights(vllm_config.speculative_config):
        return None
    return _at(vllm_config, "speculative_config.draft_model_config.quantization")


def _drafter_with_state(vllm_config: VllmConfig) -> Any:
    """The type of a drafter's model that keeps more, or another kind of KV, than the target."""
    if not has_weights(vllm_config.speculative_config):
        return None
    model = _at(vllm_config, "speculative_config.draft_model_config.hf_config.model_type")
    return model if model in _DRAFTERS_WITH_STATE else None


def _short_drafter(vllm_config: VllmConfig) -> Any:
    """The longest context of a drafter's, where it is shorter than the engine's.

    There it would leave gaps in its KV, or have no positions. Others than draft models have the
    target's positions.
    """
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if not has_weights(speculative) or model is None:
        return None
    assert speculative is not None
    drafter = speculative.draft_model_config if speculative.method == "draft_model" else None
    lengths = (speculative.max_model_len, _at(vllm_config, _LONGEST) if drafter else None)
    short = [length for length in lengths if length and length < model.max_model_len]
    return min(short, default=None)


def _several_modules(vllm_config: VllmConfig) -> Any:
    """The draft length, where more than one of a model's MTP modules would draft."""
    speculative: Any = vllm_config.speculative_config
    if not has_weights(speculative) or not speculative.use_multi_module_mtp():
        return None
    return speculative.num_speculative_tokens


def _images(vllm_config: VllmConfig) -> Any:
    """False, the value of `language_model_only`, where a class would take images and is not served
    with them. With limits of 0 for all modalities it takes text alone without the option, too."""
    model = vllm_config.model_config
    return False if takes_images(model) and model.architecture not in SERVED else None


def _with_images(option: str, *served: Any, why: str = "") -> Rule:
    """Refuse all but these values of an option of `multimodal_config`, of engines with images."""

    def refused(vllm_config: VllmConfig) -> Any:
        model = vllm_config.model_config
        if not takes_images(model):
            return None
        value = getattr(model.get_multimodal_config(), option, served[0])  # of a newer vLLM's
        return None if value in served else value

    allowed = ", ".join(map(str, served))
    return Rule(option, refused, f"{allowed}{why and f'; {why}'}")


def _processor_device(vllm_config: VllmConfig) -> Any:
    """Where images are processed, if that is not the host."""
    if not takes_images(model := vllm_config.model_config):
        return None
    device = (model.get_multimodal_config().mm_processor_kwargs or {}).get("device")
    return None if device in (None, "cpu") else device


def _encoder_cache_manager(vllm_config: VllmConfig) -> Any:
    """The class of an encoder cache manager of the user's."""
    own = getattr(vllm_config, "ec_manager_config", None)  # of vLLM 0.32
    return own and own.encoder_cache_manager_cls


def facts_of(model: ModelConfig) -> ModelFacts:
    """The facts of an engine's model that the rules about models (`model_rules.py`) look at."""
    fields = fields_of(model.hf_text_config)
    return ModelFacts(
        model.model,
        fields,
        runner=model.runner_type,
        quantization=model.quantization,
        kv_scale=kv_scale_of(fields_of(model.hf_config)),
        is_encoder_decoder=model.is_encoder_decoder,
        is_mixture=model.is_moe and may_have_experts(fields),
        has_states=model.is_hybrid or model.has_inner_state or model.is_attention_free,
    )


def _of_model(rule: ModelRule) -> Rule:
    """A rule about models, as a `Rule` that looks at the model of an engine's config."""

    def refused(vllm_config: VllmConfig) -> Any:
        model = vllm_config.model_config
        return None if model is None else rule.refused(facts_of(model))

    return Rule(rule.option, refused, rule.allowed, rule.kind, rule.mixtures)


_LONGEST = "speculative_config.draft_model_config.max_model_len"
_NIC_MAPPING = "VLLM_GPU_NIC_PCIE_MAPPING"
_KV_DTYPES = ("auto", "float16", "bfloat16", "float32", *FP8_KV)
# Reasons that several rules give.
_ON_GPU = "layouts share weights on the GPU"
_STAY = "a layout's experts stay where they are"

RULES = (
    *(
        Rule(
            option,
            _other_than(f"parallel_config.{option}", 1),
            "1 (PAT itself makes replicas of the N ranks)",
        )
        for option in (
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "nnodes",
        )
    ),
    Rule(
        "numa_bind",
        _numa_bind,
        "False with {ranks} ranks, whose GPUs PAT gives out in another order than vLLM binds by; "
        "bind the engine's process instead, e.g. numactl --cpunodebind",
    ),
    Rule(
        _NIC_MAPPING,
        _nic_mapping,
        "unset with {ranks} ranks, whose GPUs PAT gives out in another order than vLLM takes cards "
        "by; NCCL finds the nearest card itself",
    ),
    _variable(
        "VLLM_ENABLE_STARTUP_PLAN", 0, "its KV cache would leave no memory for the other layouts"
    ),
    _variable(
        "VLLM_USE_NCCL_SYMM_MEM",
        0,
        "vLLM sums over the ranks of one group in each process, whichever is active",
    ),
    _only(
        "parallel_config.enable_batch_sharded_sampling",
        False,
        why="vLLM has checked it for the layout of all ranks only",
    ),
    _only(
        "parallel_config.enable_fault_tolerance",
        False,
        why="a core that has failed would wait for orders; PAT's ends, and its callers are told",
    ),
    _only("offload_config.uva.cpu_offload_gb", 0, why=_ON_GPU),
    _only("offload_config.prefetch.offload_group_size", 0, why=_ON_GPU),
    Rule(
        "weight_transfer_config.backend",
        _equal("weight_transfer_config.backend", "sharded_rdt"),
        "nccl, ipc, sparse_nccl, nccl_m2n; sharded_rdt needs vLLM's own Ray executor",
    ),
    Rule("enable_lora", _lora, "False"),
    _only("cache_config.kv_offloading_size"),
    Rule(
        "speculative_config.method",
        _drafts,
        f"{', '.join(OF_TEXT)}; from vLLM 0.32 on also {', '.join(OF_WEIGHTS)}",
    ),
    Rule(
        "speculative_config.model",
        _drafter_with_state,
        "a drafter whose KV is of the kind and size of the target's",
    ),
    Rule(
        "speculative_config.quantization",
        _quantized_drafter,
        "None: layouts cannot share quantized drafters yet",
    ),
    Rule(
        "speculative_config.max_model_len",
        _short_drafter,
        "at least max_model_len, of drafters with weights",
    ),
    Rule(
        "speculative_config.num_speculative_tokens",
        _several_modules,
        "1, of a model with several MTP modules",
    ),
    *(
        _of_drafter(option, None, "None: a drafter is loaded and run as the target is")
        for option in ("draft_load_config", "attention_backend", "kv_cache_dtype", "moe_backend")
    ),
    *(
        _of_drafter(option, False, "False, of drafters with weights")
        for option in (
            "parallel_drafting",
            "enable_adaptive_verification",
            "use_heterogeneous_vocab",
        )
    ),
    _of_drafter("draft_sample_method", "greedy", "greedy, of drafters with weights"),
    _only(
        "speculative_config.rejection_sample_method",
        "standard",
        "block",
        why="PAT's outputs are those of the model",
        option="speculative_config.rejection_sample_method",
    ),
    _only("watermark_config"),
    _only("model_config.enable_trace_replay", False),
    _only("kv_transfer_config"),
    _only("ec_transfer_config"),
    Rule("kv_events_config", _kv_events, "None"),
    Rule("attention_backend", _attention_backend, "TRITON_ATTN"),
    _only("cache_config.cache_dtype", *_KV_DTYPES, option="kv_cache_dtype"),
    Rule(
        "kv_cache_dtype_skip_layers",
        _layers_of_two_dtypes,
        "[], with KV in fp8",
    ),
    _of_model(RUNNER),
    _of_model(QUANTIZATION),
    _of_model(KV_SCALE),
    Rule(
        "language_model_only",
        _images,
        f"True, of a class with a vision tower: its text alone; with images {', '.join(SERVED)}",
    ),
    _only("model_config.multimodal_config.enable_mm_embeds", False),
    _with_images(
        "mm_processor_cache_type",
        "lru",
        why="of one in shared memory every rank would have to read each image",
    ),
    _with_images("mm_ipc_gpu_memory_gb", 0, why="layouts count all of the GPU's memory"),
    _with_images("mm_encoder_only", False),
    Rule("mm_processor_device", _processor_device, "cpu: layouts count all of the GPU's memory"),
    _with_images("mm_encoder_attn_dtype", None),
    _with_images(
        "video_pruning_rate",
        None,
        0,
        why="positions of tokens would depend on what a tower said of frames",
    ),
    Rule(
        "ec_manager_config",
        _encoder_cache_manager,
        "None: a switch empties vLLM's own encoder cache, and knows no other",
    ),
    _only("compilation_config.cudagraph_mm_encoder", False, why="layouts do not share its graphs"),
    _only("compilation_config.compile_mm_encoder", False),
    # Rules for mixtures of experts. What only a built layer shows is refused by the workers
    # (`check_experts` in weights/experts.py).
    _only(
        "parallel_config.enable_expert_parallel",
        False,
        why="pat.experts='ep' spreads experts over the group of each layout",
        mixtures=True,
    ),
    _only("parallel_config.enable_eplb", False, why=_STAY, mixtures=True),
    _only("parallel_config.eplb_config.num_redundant_experts", 0, why=_STAY, mixtures=True),
    _only("parallel_config.expert_placement_strategy", "linear", mixtures=True),
    _only("parallel_config.enable_elastic_ep", False, why=_STAY, mixtures=True),
    _only(
        "parallel_config.all2all_backend",
        "allgather_reducescatter",
        why="tokens do not leave their group, which needs no such backend",
        mixtures=True,
    ),
    _only("parallel_config.enable_dbo", False, mixtures=True),
    _only(
        "aux_output_config.enable_return_routed_experts",
        False,
        why="layouts cannot replay routing yet",
        mixtures=True,
    ),
    _only(
        "kernel_config.moe_backend",
        "auto",
        "triton",
        *RUN_BY_TRITON,
        why="the last three run as triton (on CPU as auto), with a warning; others lay experts out "
        "in ways that layouts cannot share, or are for quantized ones",
        mixtures=True,
    ),
    # Rules for models with linear attention.
    Rule(
        "speculative_config",
        _drafts_of_linear,
        f"ngram_gpu, {', '.join(OF_WEIGHTS)}, with Model Runner V2, of a drafter without linear "
        "attention: layouts cannot share the states of other drafts yet",
        linear=True,
    ),
    _only("cache_config.mamba_cache_mode", "none", "align", linear=True),
    _only("cache_config.prefix_match_unit", why="a hit ends with a block", linear=True),
    _variable("VLLM_SSM_CONV_STATE_LAYOUT", "SD", linear=True),
    _only(
        "cache_config.use_replayssm",
        False,
        why="layouts cannot share the inputs that it keeps beside states",
        linear=True,
    ),
    *map(_of_model, KINDS_OF_MODELS),
)
"""All that is refused, in the order in which an error names it."""
