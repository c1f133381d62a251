"""The profile of an engine: read from a file, found in the cache, or measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from pat_vllm.layout import Layout
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling.key import profile_key, title
from pat_vllm.profiling.plan import ProfilePlan, from_wire, to_wire
from pat_vllm.profiling.profile import Profile, StepSample, SwitchSample
from pat_vllm.profiling.runner import engine_limits, profile_engine
from pat_vllm.worker.layout_config import kv_bytes_per_token

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pat_vllm.executor.executor import PATExecutorMixin

logger = init_logger(__name__)


def load_or_measure(
    vllm_config: VllmConfig,
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    path: str | None,
    *,
    seconds_to_make: Callable[[Layout], float] | None = None,
) -> Profile:
    """The profile of an engine that has just started and has no request.

    Args:
        kv_cache_config: the base layout's.
        path: a profile that the user named; None takes the cached one, or measures and caches.
        seconds_to_make: see `profile_engine`.

    Returns:
        The profile, with this engine's KV memory (which may differ a little from start to start).

    Raises:
        ProfileError: the named file is damaged, or was made for another engine.
    """
    begun = time.perf_counter()
    key = profile_key(vllm_config)
    if path is not None:
        profile = Profile.load(Path(path))
        profile.check(key, path)
        logger.info("PAT uses the profile %s (%s)", path, profile.title)
    elif (cached := profile_cache.find(key)) is not None:
        profile = cached
        logger.info("PAT uses the cached profile %s", profile_cache.cache_path(key))
    else:
        plan = ProfilePlan.quick(engine_limits(vllm_config, kv_cache_config))
        samples = profile_engine(executor, plan, kv_cache_config, seconds_to_make=seconds_to_make)
        profile = make_profile(
            header(vllm_config, kv_cache_config),
            samples.steps,
            samples.switches,
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
    return profile.model_copy(update={"kv_tokens": _kv_tokens(vllm_config, kv_cache_config)})


def header(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """What a `Profile` says of its engine, as plain values."""
    limits = engine_limits(vllm_config, kv_cache_config)
    base = limits.layouts[0]
    assert vllm_config.model_config is not None
    return {
        "kind": "measured",
        "title": title(vllm_config),
        "key": profile_key(vllm_config),
        "ranks": base.world_size,
        "layouts": [layout.tp for layout in limits.layouts],
        "max_num_seqs": limits.max_num_seqs,
        "max_batch_tokens": limits.max_batch_tokens,
        "kv_tokens": _kv_tokens(vllm_config, kv_cache_config),
        "kv_bytes_per_token": kv_bytes_per_token(
            kv_cache_config, base, vllm_config.model_config.get_total_num_kv_heads()
        ),
    }


def make_profile(
    header: Mapping[str, Any],
    steps: Sequence[StepSample],
    switches: Sequence[SwitchSample],
    note: str,
) -> Profile:
    """A profile made now, from the engine's header and the samples."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Profile(
        **header, created=created, steps=tuple(steps), switches=tuple(switches), note=note
    )


def _kv_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[int, int]:
    limits = engine_limits(vllm_config, kv_cache_config)
    return {tp: blocks * limits.block_size for tp, blocks in limits.blocks.items()}


def profile_command(
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    points: Sequence[Mapping[str, Any]] | None,
    quick: bool,
    *,
    switch_id: int,
    seconds_to_make: Callable[[Layout], float] | None = None,
) -> dict[str, Any]:
    """Serve a front end that takes a profile part by part. Plain values in and out.

    Args:
        points: to measure now, as made by `to_wire`; None asks for the plan.
        quick: of the quick plan, and with its patience; otherwise of the full one.

    Returns:
        Without points, the profile's `header` and the plan's `points`; else the `steps` and
        `switches` measured.
    """
    vllm_config: VllmConfig = executor.vllm_config  # type: ignore[attr-defined]
    limits = engine_limits(vllm_config, kv_cache_config)
    plan = ProfilePlan.quick(limits) if quick else ProfilePlan.full(limits)
    if points is None:
        return {
            "header": _string_keys(header(vllm_config, kv_cache_config)),
            "points": [to_wire(point) for point in plan.points],
        }
    part = plan.part(from_wire(point) for point in points)
    samples = profile_engine(
        executor, part, kv_cache_config, switch_id=switch_id, seconds_to_make=seconds_to_make
    )
    return {
        "steps": [sample.model_dump() for sample in samples.steps],
        "switches": [sample.model_dump() for sample in samples.switches],
    }


def _string_keys(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it, so that what is sent and what is read from a file compare equal."""
    kv_tokens = {str(tp): tokens for tp, tokens in values["kv_tokens"].items()}
    return {**values, "kv_tokens": kv_tokens}
