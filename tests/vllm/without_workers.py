"""PAT's scheduler without workers, for eight ranks and large pools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.models import random_model

RANKS = 8
BLOCK_SIZE = 16


class Executor:
    """Stands for the workers where `PATScheduler` asks about them."""

    setup: Any
    """Of the engine that was made last."""
    weights_version = 0

    def register_command(self, name: str, command: Any) -> None:
        """Commands are not called here."""

    def transfer_rates(self) -> Any:
        """Any rates."""
        from pat_vllm.executor.messages import TransferRates
        from pat_vllm.layout import Layout

        return TransferRates(1e9, {Layout.of(tp, RANKS): 1e4 for tp in (1, 2, 4, 8)})

    is_sleeping = False
    kv_is_void = False
    drafter_is_stale = False

    def refresh_weights(self) -> bool:
        """There are none."""
        return not self.is_sleeping

    def reseed(self, salt: int) -> None:
        """None samples."""

    def fail(self, error: Exception) -> None:
        """There is no engine to end."""

    def waits_for_weights(self) -> bool:
        """None are coming in."""
        return False

    def finished(self, wait_for_all: bool = False) -> list[Any]:
        """No step is in flight."""
        return []

    def switch(self, command: Any) -> list[Any]:
        """Nothing to move."""
        from pat_vllm.executor.messages import SwitchTimes

        return [SwitchTimes(0.0, 0.0, 0.0, 0.0, 0)] * RANKS


EXECUTOR = Executor()
"""Engines know theirs by a weak reference."""


def spec(kind: type[Any], **options: Any) -> Any:
    """One of vLLM's `AttentionSpec`s, of 8 KV heads, for `engine_config`."""
    import torch

    return kind(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=32, dtype=torch.bfloat16, **options
    )


def engine_config(
    tp: int,
    num_blocks: int = 20_000,
    policy: dict[str, Any] | None = None,
    specs: Sequence[Any] = (),
    state_dir: Path | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """A PAT engine's config that stays in `tp`, and the scheduler's other arguments.

    Args:
        num_blocks: of a rank in the base layout.
        policy: another one than to stay, with which a batch is over when no request is left.
        specs: of the groups of KV caches, if it is not one of full attention; see `spec`.
        state_dir: PAT's option.
        options: the engine's, for others than here.
    """
    from vllm.engine.arg_utils import EngineArgs

    from pat_vllm.executor import executor as executor_module
    from pat_vllm.start.setup import Setup

    pat: dict[str, Any] = {
        "policy": policy or {"kind": "static", "tp": tp, "idle_seconds": 0},
        "layouts": [1, 2, 4, 8],
    }
    if state_dir is not None:
        pat["state_dir"] = str(state_dir)
    config = EngineArgs(
        model=str(random_model("eight_kv_heads")),
        tensor_parallel_size=RANKS,
        distributed_executor_backend="pat",
        additional_config={"pat": pat},
        max_model_len=8192,
        max_num_seqs=256,
        enforce_eager=True,
        **options,
    ).create_engine_config()
    executor_module._executors[config.instance_id] = EXECUTOR  # type: ignore[assignment]
    EXECUTOR.setup = Setup.of(config)
    return config, scheduler_arguments(config, num_blocks, specs)


def kv_cache_config(num_blocks: int, specs: Sequence[Any] = ()) -> Any:
    """Of groups of a layer each; for `specs`, see `engine_config`."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    groups = [
        KVCacheGroupSpec([f"layer {group}"], group_spec)
        for group, group_spec in enumerate(specs or [spec(FullAttentionSpec)])
    ]
    page = groups[0].kv_cache_spec.page_size_bytes
    size = num_blocks * page
    tensors = [KVCacheTensor(size, group.layer_names, size, page) for group in groups]
    return KVCacheConfig(num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def scheduler_arguments(config: Any, num_blocks: int, specs: Sequence[Any] = ()) -> dict[str, Any]:
    """What a scheduler with this config takes beside it. The config is told of the blocks."""
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = num_blocks
    return dict(
        kv_cache_config=kv_cache_config(num_blocks, specs),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


def pat_scheduler(tp: int, **options: Any) -> Any:
    """A scheduler that is in `tp`; see `engine_config`."""
    from pat_vllm.scheduler.scheduler import PATScheduler

    config, stock = engine_config(tp, **options)
    return PATScheduler(vllm_config=config, **stock)


def request(request_id: str, seed: int, prompt: int = 32, max_tokens: int = 8000) -> Any:
    """A request of `prompt` tokens, unlike those of other seeds."""
    tokens = [seed // 400 + 3, seed % 400 + 3] * (prompt // 2)
    return request_of(request_id, tokens, max_tokens)


def request_of(
    request_id: str, tokens: list[int], new: int, salt: str | None = None, **sampling: Any
) -> Any:
    """A request of these tokens, for so many new ones; `sampling` goes to `SamplingParams`."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    params = SamplingParams(max_tokens=new, ignore_eos=True, **sampling)
    return Request(request_id, tokens, params, None, block_hasher=hasher, cache_salt=salt)


def answer(step: Any) -> Any:
    """A runner's output: one token for each request that was scheduled."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[7]] * len(ids),
    )
