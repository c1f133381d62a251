"""Mistakes in PAT that the matrix of platforms has to see, each in the smallest part of it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.support.mutation import mutated

COMPILE_RANGES = "compile ranges"
OPTIONS = "options"


@dataclass(frozen=True)
class Mistake:
    """A mistake, and where it shows.

    Attributes:
        platform, seen_in: of `PLATFORMS`; a backend, an option, or `COMPILE_RANGES`.
        changes: by function (`module:name`), what replaces what in its source.
    """

    platform: str
    seen_in: str
    changes: dict[str, dict[str, str]]

    @contextmanager
    def made(self) -> Iterator[None]:
        """Inside, PAT has the mistake."""
        with ExitStack() as stack:
            for function, changes in self.changes.items():
                stack.enter_context(mutated(pkgutil.resolve_name(function), changes))
            yield


UNSUPPORTED = "pat_vllm.support:_unsupported"
CHOICE = "pat_vllm.support:_choose_attention_backend"
RUNTIME = "pat_vllm.worker.runtime:LayoutRuntime"
WORKER = "pat_vllm.worker.worker:PATWorkerMixin"
CONFIG = "pat_vllm.worker.layout_config:layout_config"
KV_CONFIG = "pat_vllm.worker.layout_config:layout_kv_cache_config"
NARROW = "pat_vllm.worker.layout_config:_narrow"
RATIO = "pat_vllm.worker.layout_config:block_ratio"
RANGES = "pat_vllm.worker.layout_config:_resize_compile_ranges"

_NO_LIST = {"backend.name in _PACKED_HEADS": "False"}
_NO_LOOK = {"if is_plain_attention(spec):": "if True:"}

MISTAKES = {
    # What once was wrong.
    "alignment of blocks is compared": Mistake(
        "sm100",
        "FLASHINFER",
        {
            f"{RUNTIME}.check_kv_cache": {
                "replace(specs[name], block_stride_alignment=alignment)": "specs[name]"
            }
        },
    ),
    "ROCm's own first choice": Mistake(
        "rocm", "default", {CHOICE: {"attention.backend is None": "False"}}
    ),
    "ROCM_ATTN passes the front end": Mistake("rocm", "ROCM_ATTN", {UNSUPPORTED: _NO_LIST}),
    "ROCM_SEGMENTED_ATTN passes the front end": Mistake(
        "rocm", "ROCM_SEGMENTED_ATTN", {UNSUPPORTED: _NO_LIST}
    ),
    "B12X passes the front end": Mistake("sm90", "B12X", {UNSUPPORTED: _NO_LIST}),
    "shuffled KV passes the first check": Mistake(
        "rocm", "ROCM_AITER_FA, shuffled", {f"{RUNTIME}.check_kv_cache_specs": _NO_LOOK}
    ),
    "compile ranges of all ranks as one group": Mistake(
        "sm90", COMPILE_RANGES, {CONFIG: {"_resize_compile_ranges(config, vllm_config)": "pass"}}
    ),
    "sampling in shards of the batch": Mistake(
        "sm90",
        "enable_batch_sharded_sampling",
        {UNSUPPORTED: {"parallel.enable_batch_sharded_sampling": "False"}},
    ),
    "weights in CPU memory": Mistake(
        "sm90", "cpu_offload_gb", {UNSUPPORTED: {"offload.uva.cpu_offload_gb": "0"}}
    ),
    "weights that are fetched from CPU memory": Mistake(
        "sm90", "offload_group_size", {UNSUPPORTED: {"offload.prefetch.offload_group_size": "0"}}
    ),
    # Others.
    "a transfer of weights that vLLM runs under Ray only": Mistake(
        "sm90",
        "weight_transfer_config",
        {UNSUPPORTED: {'transfer.backend == "sharded_rdt"': "False"}},
    ),
    "a user's choice is overridden": Mistake(
        "rocm", "ROCM_AITER_FA", {CHOICE: {"attention.backend is None": "True"}}
    ),
    "all ranks as one group in every layout": Mistake(
        "sm90",
        "FLASH_ATTN",
        {CONFIG: {"tensor_parallel_size = layout.tp": "tensor_parallel_size = layout.world_size"}},
    ),
    "as many blocks as in the base layout": Mistake(
        "sm80", "TRITON_ATTN", {KV_CONFIG: {"base.num_blocks * ratio": "base.num_blocks"}}
    ),
    "blocks that are not narrower": Mistake(
        "sm100",
        "FLEX_ATTENTION",
        {NARROW: {"spec.num_kv_heads // ratio": "spec.num_kv_heads"}},
    ),
    "one ratio too many": Mistake(
        "rocm",
        "TRITON_ATTN",
        {RATIO: {"base.kv_heads_per_rank(num_kv_heads) //": "2 * num_kv_heads //"}},
    ),
    "only the base layout hears of the KV cache layout": Mistake(
        "sm90",
        "FLASHINFER",
        {f"{WORKER}.set_kv_cache_layout": {"self._runtimes.values()": "[self._base]"}},
    ),
    "views of the base layout for all": Mistake(
        "sm90",
        "FLASH_ATTN",
        {
            f"{WORKER}.initialize_from_config": {
                "runtime.register_kv(config, self._buffer)": "runtime.register_kv("
                "kv_cache_config, self._buffer)"
            }
        },
    ),
    "norms are fused with all-reduces on one rank": Mistake(
        "sm90", COMPILE_RANGES, {RANGES: {"pass_config.fuse_allreduce_rms = False": "mode"}}
    ),
    "vLLM's ends of ranges for all ranks stay": Mistake(
        "sm90", COMPILE_RANGES, {RANGES: {"set(ranges) - set(added)": "set(ranges)"}}
    ),
    "a user's ends of ranges are lost": Mistake(
        "sm90", COMPILE_RANGES, {RANGES: {"sorted(set(ranges) - set(added))": "[]"}}
    ),
}
