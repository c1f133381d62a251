"""How PAT checks and prepares a `VllmConfig`.

`plugin.py` calls `prepare` in the front end before any worker starts, so that a mistake is a clear
error at once. The engine core and the workers read the result by `Setup.of` (`setup.py`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.config import SCHEDULER_CLS, PATConfig
from pat_vllm.layout import Layout
from pat_vllm.models.drafters import has_weights
from pat_vllm.models.images import WITH_WHOLE_TOWERS, takes_images
from pat_vllm.models.layer_sizes import fields_of, linear_heads
from pat_vllm.models.model_rules import refusal
from pat_vllm.models.quantization import Quantized
from pat_vllm.policy_config import PolicyConfig, PredictorPolicyConfig, SchedulePolicyConfig
from pat_vllm.profile import Profile
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.found_device import found_device
from pat_vllm.start.load import expected_load
from pat_vllm.start.refused import RUN_BY_TRITON, unsupported
from pat_vllm.start.setup import (
    CHOSEN,
    Chosen,
    Setup,
    chosen_of,
    mixture_of,
    options_of,
    resolve_weights,
)

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm.config import AttentionConfig, ModelConfig, SpeculativeConfig, VllmConfig

WORKER_CLS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "pat_vllm.worker.cpu_worker.PATCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "pat_vllm.worker.gpu_worker.PATGPUWorker",
}
"""PAT's worker class for each of vLLM's own."""


def prepare(vllm_config: VllmConfig) -> Setup:
    """Check a config for PAT and put PAT's choices, worker and scheduler in. Idempotent.

    Returns:
        What the options come to, as the engine's other processes will find it.

    Raises:
        ValueError: an option that PAT does not support; names it, its value and the way out.
    """
    if problems := unsupported(vllm_config):
        raise ValueError(refusal(problems))
    options = _choose_experts(vllm_config, options_of(vllm_config))
    _check_profile(options.policy)
    _choose_layouts(vllm_config, options)
    setup = Setup.of(vllm_config)
    _check_heads(vllm_config, setup.layouts)
    _check_draft_lengths(setup)
    _put_in_classes(vllm_config)
    _choose_attention_backend(vllm_config.attention_config)
    _hash_blocks_alone(vllm_config.speculative_config)
    _keep_towers_whole(vllm_config.model_config)
    return setup


def _put_in_classes(vllm_config: VllmConfig) -> None:
    """Have vLLM make PAT's workers and scheduler.

    Raises:
        ValueError: the user has named classes, or PAT does not run on this platform.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls not in WORKER_CLS.values():
        stock = _platform_worker() if parallel.worker_cls == "auto" else parallel.worker_cls
        if stock not in WORKER_CLS:
            raise ValueError(
                f'distributed_executor_backend="pat" brings its own worker_cls, but worker_cls='
                f"{parallel.worker_cls!r} is set; leave it at 'auto'. To add methods to the "
                "worker, use worker_extension_cls."
            )
        parallel.worker_cls = WORKER_CLS[stock]
    if scheduler.scheduler_cls not in (None, SCHEDULER_CLS):
        raise ValueError(
            f'distributed_executor_backend="pat" brings its own scheduler_cls, but scheduler_cls='
            f"{scheduler.scheduler_cls!r} is set; leave it unset"
        )
    scheduler.scheduler_cls = SCHEDULER_CLS


def _hash_blocks_alone(speculative: SpeculativeConfig | None) -> None:
    """Have a KV block's hash cover the block's own tokens, and none that follow it.

    From 0.33 on, vLLM has it cover tokens that a drafter with weights reads behind the block,
    unless a KV connector is configured. PAT's replicas have a connector, and the engine core, which
    computes the hashes, has none: they would take the same hash for different tokens.
    """
    if speculative is not None and hasattr(speculative, "disable_lookahead_block_hashes"):
        speculative.disable_lookahead_block_hashes = True


def _keep_towers_whole(model: ModelConfig | None) -> None:
    """Have each rank hold all of a vision tower, which then is the same in every layout. Other
    classes have theirs cut; vLLM checks that when a user asks for one or the other."""
    if model is not None and takes_images(model) and model.architecture in WITH_WHOLE_TOWERS:
        model.get_multimodal_config().mm_encoder_tp_mode = "data"


def _choose_attention_backend(attention: AttentionConfig) -> None:
    """On ROCm, take the backend that serves every GPU, unless the user has chosen one.

    vLLM's own first choice, ROCM_ATTN, keeps keys and values apart: no layouts can share them.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_rocm() and attention.backend is None:
        attention.backend = AttentionBackendEnum.TRITON_ATTN


def _choose_experts(vllm_config: VllmConfig, options: PATConfig) -> PATConfig:
    """For a mixture of experts, choose kernels that run experts as layouts share them.

    Where kernels run only experts that are cut over the ranks (vLLM's packed ones on CPU), the
    option `experts` becomes "tp".

    Returns:
        The options with that choice.

    Raises:
        ValueError: the platform's kernels for packed experts cannot run spread ones.
    """
    from vllm.platforms import current_platform

    if mixture_of(vllm_config) is None:
        return options
    if current_platform.is_cpu() and resolve_weights(vllm_config, options) == "materialized":
        if options.experts == "auto":
            options = _set_options(vllm_config, {"experts": "tp"})
        elif options.experts == "ep":
            raise ValueError(
                "pat.experts is 'ep', but vLLM's CPU kernels, which "
                "pat.weights='materialized' packs experts for, run only cut ones; set "
                "pat.weights='inplace' or pat.experts='tp'"
            )
    kernels = vllm_config.kernel_config
    own = "triton" if current_platform.is_cuda_alike() else "auto"
    if kernels.moe_backend in RUN_BY_TRITON:
        logger.warning(
            "PAT: moe_backend=%r lays experts out in ways that layouts cannot share; %r takes its "
            "place. It costs time where those kernels are faster, which PAT has not measured: "
            "vLLM itself prefers FlashInfer's on Blackwell and AITER's on ROCm, but Triton's on "
            "Hopper",
            kernels.moe_backend,
            own,
        )
    if kernels.moe_backend in ("auto", *RUN_BY_TRITON):
        kernels.moe_backend = own  # type: ignore[assignment]
    return options


def _choose_layouts(vllm_config: VllmConfig, options: PATConfig) -> None:
    """Put the layouts that the engine keeps ready in its options, where other processes find them,
    and say which."""
    model = vllm_config.model_config
    if model is None or chosen_of(vllm_config):  # no model, or prepared before
        return
    import torch

    assert isinstance(model.dtype, torch.dtype)  # a name until it is resolved
    from pat_vllm.start.choice import choose

    options, pinned = _pin_layout(vllm_config, options)
    shape = _engine_shape(vllm_config, options)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    choice = choose(
        fields_of(model.hf_text_config),
        options,
        shape,
        ranks,
        found_device(ranks),
        dtype_bytes=model.dtype.itemsize,
        quantized=Quantized.of(
            fields_of(model.hf_config),
            model.quantization,
            vllm_config.cache_config.cache_dtype,
        ),
        drafter=drafter_of(vllm_config.speculative_config),
        tower=fields_of(model.hf_config) if takes_images(model) else None,
        load=expected_load(options, shape, ranks),
    )
    found = "; ".join(filter(None, (pinned + choice.found, choice.warning)))
    told = Chosen(found=found, more_room=choice.more_room, link=choice.link)
    _set_options(vllm_config, choice.options, **{CHOSEN: told})
    logger.info("PAT: %s", choice.found)
    if choice.warning is not None:
        logger.warning("PAT: %s", choice.warning)


def drafter_of(speculative: SpeculativeConfig | None) -> tuple[str, dict[str, Any]] | None:
    """The method of a drafter with weights, and the fields of its config."""
    if speculative is None or not has_weights(speculative):
        return None
    config: Any = speculative.draft_model_config.hf_text_config
    # vLLM wraps an EAGLE head's config in one of its own.
    return str(speculative.method), fields_of(getattr(config, "model", None) or config)


def _pin_layout(vllm_config: VllmConfig, options: PATConfig) -> tuple[PATConfig, str]:
    """With vLLM's batch invariance, have one layout, and say so.

    Returns:
        The options, and in a few words why they have changed; "" where they have not.
    """
    import vllm.envs as envs

    if not envs.VLLM_BATCH_INVARIANT:
        return options, ""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    options = _set_options(vllm_config, options.pinned(ranks))
    logger.warning(
        "PAT: VLLM_BATCH_INVARIANT=1 pins tp=%s: another layout would sum in another order. The "
        "engine does not switch, and drafts from no earlier responses. Set pat.policy to "
        "{'kind': 'static', 'tp': T} for another layout, or VLLM_BATCH_INVARIANT=0 to switch",
        options.base_tp,
    )
    return options, "pinned by VLLM_BATCH_INVARIANT=1: "


def _set_options(vllm_config: VllmConfig, pat: dict[str, Any], **others: Any) -> PATConfig:
    """Replace options of PAT's, and add other entries of `additional_config`.

    Returns:
        The options as they are now.
    """
    options = vllm_config.additional_config or {}
    assert isinstance(options, dict)
    own = {**(options.get("pat") or {}), **pat}
    vllm_config.additional_config = {**options, "pat": own, **others}
    return options_of(vllm_config)


def _engine_shape(vllm_config: VllmConfig, options: PATConfig) -> EngineShape:
    """What the memory of an engine depends on, whose layouts are not chosen yet."""
    from vllm.platforms import current_platform

    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    model, backend = vllm_config.model_config, vllm_config.attention_config.backend
    on_cpu = current_platform.is_cpu()
    flashinfer = backend is not None and backend.name == "FLASHINFER"
    return EngineShape(
        (),  # layouts
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        block_size=cache.block_size or EngineShape.block_size,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        enforce_eager=model.enforce_eager,
        runner="V2" if vllm_config.use_v2_model_runner else "V1",
        weights=resolve_weights(vllm_config, options),
        migrates=options.kv_transfer != "recompute",
        attention="CPU_ATTN" if on_cpu else "FLASHINFER" if flashinfer else "FLASH_ATTN",
        num_speculative_tokens=vllm_config.num_speculative_tokens,
    )


def _check_profile(policy: PolicyConfig) -> None:
    """Check that a profile which the user names is whole: here an error reaches the user at once.

    Profiles that engines cached themselves are not checked: the engine core sets aside what it
    cannot read.
    """
    if isinstance(policy, PredictorPolicyConfig) and policy.profile is not None:
        # The scheduler checks that it is this engine's.
        Profile.load(Path(policy.profile))


def _platform_worker() -> str:
    """Name of vLLM's own worker class for this platform, a key of `WORKER_CLS`."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "vllm.v1.worker.cpu_worker.CPUWorker"
    if current_platform.is_cuda_alike():
        return "vllm.v1.worker.gpu_worker.Worker"
    raise ValueError(
        f'distributed_executor_backend="pat" runs on CUDA, ROCm and CPU, not on '
        f"{current_platform.device_name!r}"
    )


def _check_draft_lengths(setup: Setup) -> None:
    """Check that a schedule policy names only draft lengths that the engine keeps ready."""
    policy, allowed = setup.options.policy, setup.draft_lengths
    if not isinstance(policy, SchedulePolicyConfig) or not policy.num_speculative_tokens:
        return
    if not allowed:
        raise ValueError(
            "pat.policy.num_speculative_tokens is set, but the engine has no speculative_config"
        )
    for tp, length in policy.num_speculative_tokens.items():
        if length not in allowed:
            raise ValueError(
                f"pat.policy.num_speculative_tokens has {length} for tp={tp}; the engine keeps "
                f"the draft lengths {list(allowed)} ready"
            )


def _check_heads(vllm_config: VllmConfig, layouts: tuple[Layout, ...]) -> None:
    """Check that each layout's tp divides, or copies evenly, the heads of the model's layers."""
    model = vllm_config.model_config
    if model is None:
        return
    num_heads = model.model_arch_config.total_num_attention_heads
    key_heads = linear_heads(fields_of(model.hf_text_config))
    for layout in layouts:
        if num_heads % layout.tp:
            raise ValueError(
                f"layout tp={layout.tp} does not divide the model's {num_heads} attention heads; "
                "name only layouts that do in pat.layouts"
            )
        if key_heads % layout.tp:
            raise ValueError(
                f"layout tp={layout.tp} does not divide the {key_heads} key heads (of Mamba2 "
                "groups, which vLLM would copy) of the model's linear attention; name only layouts "
                "that do in pat.layouts"
            )
        try:
            layout.kv_heads_per_rank(model.get_total_num_kv_heads())
        except ValueError as error:
            raise ValueError(f"layout tp={layout.tp}: {error}; change pat.layouts") from None
