"""Where an engine's profile comes from: a file, the cache, or a measurement.

`load_or_measure` is for the engine itself, at its start. `describe` and `measure` serve a front end
that measures an idle engine part by part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from pat_vllm.layout import Layout
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling.header import engine_limits, profile_header
from pat_vllm.profiling.plan import ProfilePlan
from pat_vllm.profiling.points import POINTS
from pat_vllm.profiling.profile import Profile
from pat_vllm.profiling.runner import profile_engine

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pat_vllm.executor.executor import PATExecutorMixin

logger = init_logger(__name__)


def load_or_measure(
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    path: str | None,
    *,
    seconds_to_make: Callable[[Layout], float] | None = None,
) -> Profile:
    """The profile of an engine that has just started and has no request.

    Args:
        kv_cache_config: the base layout's.
        path: a profile that the user named. None takes the cached one, or measures and caches.
        seconds_to_make: see `profile_engine`.

    Returns:
        The profile, with this engine's KV memory (which may differ a little from start to start).

    Raises:
        ProfileError: the named file is damaged, or was made for another engine.
    """
    begun = time.perf_counter()
    header = profile_header(executor, kv_cache_config)
    key = header["key"]
    if path is not None:
        profile = Profile.load(Path(path))
        profile.check(key, path)
        logger.info("PAT uses the profile %s (%s)", path, profile.title)
    elif (cached := profile_cache.find(key)) is not None:
        profile = cached
        logger.info("PAT uses the cached profile %s", profile_cache.cache_path(key))
    else:
        samples = profile_engine(
            executor,
            _plan(executor, kv_cache_config, quick=True),
            kv_cache_config,
            seconds_to_make=seconds_to_make,
        )
        profile = Profile(
            **header,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            steps=samples.steps,
            switches=samples.switches,
            note="quick profile at an engine's start",
        )
        kept = profile_cache.keep(profile)
        logger.info(
            "PAT measured %d kinds of steps and %d switches in %.1f s (%d left out for want of "
            "time); kept in %s",
            len(samples.steps),
            len(samples.switches),
            time.perf_counter() - begun,
            samples.skipped,
            kept,
        )
    kv_tokens = {int(tp): tokens for tp, tokens in header["kv_tokens"].items()}
    return profile.model_copy(update={"kv_tokens": kv_tokens})


def describe(
    executor: PATExecutorMixin, kv_cache_config: KVCacheConfig, quick: bool
) -> dict[str, Any]:
    """What to measure of an engine, as plain values.

    Args:
        quick: of the quick plan; otherwise of the full one.

    Returns:
        The profile's `header` and the plan's `points`.
    """
    plan = _plan(executor, kv_cache_config, quick)
    return {
        "header": profile_header(executor, kv_cache_config),
        "points": POINTS.dump_python(list(plan.points)),
    }


def measure(
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    points: Sequence[Mapping[str, Any]],
    quick: bool,
    *,
    switch_id: int,
    seconds_to_make: Callable[[Layout], float] | None = None,
) -> dict[str, Any]:
    """Measure some of the points that `describe` listed. Plain values in and out.

    Args:
        quick: with the quick plan's patience; otherwise with the full one's.
        switch_id, seconds_to_make: see `profile_engine`.

    Returns:
        The `steps` and `switches` measured.
    """
    plan = _plan(executor, kv_cache_config, quick)
    samples = profile_engine(
        executor,
        plan.part(POINTS.validate_python(points)),
        kv_cache_config,
        switch_id=switch_id,
        seconds_to_make=seconds_to_make,
    )
    return {
        "steps": [sample.model_dump() for sample in samples.steps],
        "switches": [sample.model_dump() for sample in samples.switches],
    }


def _plan(executor: PATExecutorMixin, kv_cache_config: KVCacheConfig, quick: bool) -> ProfilePlan:
    vllm_config = executor.vllm_config
    limits = engine_limits(vllm_config, kv_cache_config)
    return ProfilePlan.quick(limits) if quick else ProfilePlan.full(limits)
