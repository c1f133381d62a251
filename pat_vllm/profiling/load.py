"""Where an engine's profile comes from: a file, the cache, or a measurement.

`load_or_measure` is for an engine's start (`scheduler/build.py`); `measure` for a user who asks an
idle engine for a profile (`scheduler/commands.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from pat_vllm.layout import Layout
from pat_vllm.models.drafters import has_weights, is_measured, reads_ahead
from pat_vllm.models.layer_sizes import routing_of
from pat_vllm.profile import Profile
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling.grid import EngineLimits, Plan
from pat_vllm.profiling.key import profile_key, title
from pat_vllm.profiling.quality import REMEDY, problems
from pat_vllm.profiling.runner import Profiler
from pat_vllm.worker.layout_config import block_ratio, kinds_of
from pat_vllm.worker.synthetic import FIRST_BLOCK, draft_slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pat_vllm.executor.executor import PATExecutorMixin

logger = init_logger(__name__)


def load_or_measure(
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    path: str | None,
    seconds_to_make: Callable[[Layout], float],
) -> Profile:
    """The profile of an engine that has just started and has no request.

    Args:
        kv_cache_config: the base layout's.
        path: a profile that the user named. None takes the cached one, or measures; what is
            measured is cached, unless it is noisy or incomplete (`quality.problems`).
        seconds_to_make: seconds that making a layout's schedulers takes, part of every switch.

    Returns:
        The profile, with this engine's KV memory (which may differ a little from start to start).

    Raises:
        ProfileError: the named file is damaged, or was made for another engine.
    """
    header = profile_header(executor, kv_cache_config)
    if path is not None:
        profile = Profile.load(Path(path))
        profile.check(header["key"], path)
        logger.info("PAT uses the profile %s (%s)", path, profile.title)
        if defects := problems(profile.steps):
            logger.warning("The profile %s may mislead PAT: %s. %s", path, defects[0], REMEDY)
    elif (cached := profile_cache.find(header["key"])) is not None:
        profile = cached
        logger.info("PAT uses the cached profile %s", profile_cache.cache_path(profile.key))
    else:
        profile = _measure_at_start(executor, kv_cache_config, header, seconds_to_make)
    return profile.model_copy(update={"kv_tokens": header["kv_tokens"]})


def _measure_at_start(
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    header: Mapping[str, Any],
    seconds_to_make: Callable[[Layout], float],
) -> Profile:
    """Measure, log what came of it, and cache the profile if it has no defects."""
    begun = time.perf_counter()
    plan = Plan.of(engine_limits(executor, kv_cache_config))
    samples = Profiler(executor, plan, seconds_to_make).run()
    profile = _profile(header, samples, "quick profile at an engine's start")
    defects = problems(profile.steps, samples.skipped, len(plan.points))
    kept = None if defects else profile_cache.keep(profile)
    logger.info(
        "PAT measured %d kinds of steps and %d switches in %.1f s (%d points left out for want of "
        "time); kept in %s",
        len(samples.steps),
        len(samples.switches),
        time.perf_counter() - begun,
        samples.skipped,
        kept or "this engine only",
    )
    if defects:
        logger.warning(
            "The profile that PAT has measured may mislead it: %s. It is not kept, and the next "
            "start measures again. %s",
            "; ".join(defects),
            REMEDY,
        )
    return profile


def _profile(header: Mapping[str, Any], samples: Profiler, note: str) -> Profile:
    return Profile(
        **header,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        steps=tuple(samples.steps),
        switches=tuple(samples.switches),
        note=note,
    )


def measure(
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    seconds: float,
    switch_id: int,
    seconds_to_make: Callable[[Layout], float],
) -> dict[str, Any]:
    """Measure an engine that has no request, as at its start but with another budget.

    Args:
        seconds: the budget.
        switch_id: see `Profiler`.
        seconds_to_make: see `load_or_measure`.

    Returns:
        Plain values: the `profile`, and its `problems` in words.
    """
    plan = Plan.of(engine_limits(executor, kv_cache_config), seconds)
    header = profile_header(executor, kv_cache_config)
    try:
        samples = Profiler(executor, plan, seconds_to_make, switch_id).run()
    except Exception as error:
        executor.fail(error)  # the workers may be in any layout
        raise
    note = "pat-vllm profile"
    if samples.skipped:
        note += f"; {samples.skipped} of {len(plan.points)} points left out"
    profile = _profile(header, samples, note)
    return {
        "profile": profile.model_dump(mode="json"),
        "problems": problems(profile.steps, samples.skipped, len(plan.points)),
    }


def engine_limits(executor: PATExecutorMixin, kv_cache_config: KVCacheConfig) -> EngineLimits:
    """What an engine can be asked to do; `kv_cache_config` is the base layout's."""
    vllm_config, setup = executor.vllm_config, executor.setup
    layouts, limits, model = setup.layouts, setup.limits, vllm_config.model_config
    assert model is not None
    kinds = kinds_of(
        kv_cache_config,
        layouts[0],
        model.get_total_num_kv_heads(),
        reads_ahead(vllm_config.speculative_config),
    )
    return EngineLimits(
        layouts=layouts,
        max_num_seqs={tp: limit.max_num_seqs for tp, limit in limits.items()},
        max_batch_tokens={tp: limit.max_num_batched_tokens for tp, limit in limits.items()},
        max_model_len=model.max_model_len,
        kinds=kinds,
        blocks={
            layout.tp: kv_cache_config.num_blocks * block_ratio(layout, layouts[0], kinds)
            - FIRST_BLOCK
            for layout in layouts
        },
        draft_lengths=_draft_lengths(vllm_config, setup.draft_lengths),
        misses=not (vllm_config.use_v2_model_runner or has_weights(vllm_config.speculative_config)),
        drafter_has_weights=has_weights(vllm_config.speculative_config),
        draft_slots=draft_slots(vllm_config),
    )


def _draft_lengths(vllm_config: VllmConfig, kept: Sequence[int]) -> tuple[int, ...]:
    """The draft lengths to measure; none where steps cannot be told how many to verify."""
    config = vllm_config.speculative_config
    if config is None or config.method is None:
        return ()
    if not is_measured(config.method, vllm_config.use_v2_model_runner):
        return ()
    return tuple(length for length in kept if length)


def profile_header(executor: PATExecutorMixin, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """The fields of a `Profile` that describe its engine."""
    vllm_config = executor.vllm_config
    limits = engine_limits(executor, kv_cache_config)
    key = profile_key(vllm_config, executor.setup, executor.resolved_kernels())
    base = limits.layouts[0]
    assert vllm_config.model_config is not None
    routing = routing_of(vllm_config.model_config.hf_text_config.to_dict())
    return {
        "kind": "measured",
        "title": title(key),
        "key": key,
        "ranks": base.world_size,
        "layouts": limits.layouts,
        "max_num_seqs": limits.max_num_seqs,
        "max_batch_tokens": limits.max_batch_tokens,
        "kv_tokens": limits.kv_tokens,
        "kv_bytes_per_token": sum(kind.token_bytes for kind in limits.kinds),
        "experts": routing,
        "drafter_has_weights": has_weights(vllm_config.speculative_config),
    }
