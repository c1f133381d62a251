"""What vLLM's model runners keep allocated, and what of it layouts share. Pure.

Sizes are those of vLLM 0.32: `v1/worker/gpu_model_runner.py` and `gpu_input_batch.py` (V1),
`v1/worker/gpu/` (V2). Counted are tensors; NumPy arrays beside them are a few bytes per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.limits import Limits, layout_limits
from pat_vllm.memory.model import ModelShape

MiB = 1 << 20

FLASHINFER_WORKSPACE = 394 * MiB
"""The least that FlashInfer's attention takes (`VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE`)."""
_FLASHINFER_BYTES_PER_ELEMENT = 16

MAX_TOKEN_IDS = 1024
"""Allowed token ids, biased ones, and tokens of bad words, of a request."""
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
_SCANNED = {1024: 256, 256: 128, 64: 64, 0: 16}
"""Tokens of a block in which n-grams are looked for, by the least `max_model_len`."""


@dataclass(frozen=True)
class EngineShape:
    """The options of an engine that memory depends on; vLLM's names where it has them.

    Attributes:
        layouts: the base layout first.
        pat: PAT's options; those of them that limits depend on.
        runner: vLLM's model runner, V2 by default on CUDA.
        weights: PAT's option, resolved.
        migrates: whether switches carry KV between ranks.
        attention: the backend, where it keeps large buffers.
        steps_in_flight: 2 with asynchronous scheduling.
        num_speculative_tokens: the most draft tokens; 0 without speculation.
        drafter: vLLM's method.
    """

    layouts: tuple[Layout, ...]
    pat: PATConfig = field(default_factory=PATConfig)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 32768
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    runner: Literal["V1", "V2"] = "V2"
    weights: Literal["inplace", "materialized"] = "inplace"
    migrates: bool = True
    attention: Literal["FLASH_ATTN", "FLASHINFER", "CPU_ATTN"] = "FLASH_ATTN"
    steps_in_flight: int = 2
    num_speculative_tokens: int = 0
    drafter: Literal["ngram", "ngram_gpu"] = "ngram_gpu"

    def limits(self, layout: Layout) -> Limits:
        """What a replica of a layout runs at once."""
        given = Limits(self.max_num_seqs, self.max_num_batched_tokens)
        return layout_limits(layout, given, self.pat, 1 + self.num_speculative_tokens)

    @property
    def block_table_width(self) -> int:
        """Blocks of the longest request, a multiple of 128 tokens."""
        blocks = -(-self.max_model_len // self.block_size)
        aligned = max(1, 128 // self.block_size)
        return -(-blocks // aligned) * aligned


@dataclass(frozen=True)
class Buffer:
    """Something that a model runner allocates once. Bytes.

    Attributes:
        device: on the device.
        pinned: host memory that the device can read.
        pageable: other host memory.
        mirrored: `device` is a copy of as many bytes of `pinned`. On CPU they are one.
        shared: the layouts have it in common; the largest counts.
        with_kv: allocated with the KV cache, after vLLM has measured what a layout takes.
    """

    name: str
    device: int = 0
    pinned: int = 0
    pageable: int = 0
    mirrored: bool = False
    shared: bool = False
    with_kv: bool = False

    @property
    def on_cpu(self) -> int:
        """What it takes where the device is the CPU."""
        return self.pinned + self.pageable + (0 if self.mirrored else self.device)


def runner_buffers(model: ModelShape, engine: EngineShape, layout: Layout) -> list[Buffer]:
    """All that the model runner of a layout keeps."""
    make = _v2_buffers if engine.runner == "V2" else _v1_buffers
    buffers = [*make(model, engine, layout), *_attention_buffers(model, engine, layout)]
    tokens = engine.limits(layout).max_num_batched_tokens
    if size := model.expert_workspace_bytes(layout.tp, layout.experts == "ep", tokens):
        # A process has one, which grows until the first graph is captured.
        buffers.append(Buffer("workspace of experts", device=size, shared=True))
    return buffers


def all_buffers(model: ModelShape, engine: EngineShape) -> list[list[Buffer]]:
    """Of each layout, what it has to itself; the base layout's list has what is shared, too."""
    every = [runner_buffers(model, engine, layout) for layout in engine.layouts]
    # The runners of all layouts make the same buffers, in the same order.
    shared = [max(alike, key=_size) for alike in zip(*every, strict=True) if alike[0].shared]
    own = [[one for one in buffers if not one.shared] for buffers in every]
    return [shared + own[0], *own[1:]]


def _size(buffer: Buffer) -> int:
    return buffer.device + buffer.pinned + buffer.pageable


def pinned_bytes(buffers: Iterable[Sequence[Buffer]]) -> int:
    """Pinned host memory of a rank."""
    return sum(one.pinned for of_layout in buffers for one in of_layout)


# -------------------------------------------------------------------- Model Runner V2


@dataclass(frozen=True)
class _Made:
    """vLLM's `buffer_utils`: as many small pinned buffers as steps may be in flight."""

    seqs: int
    steps: int

    def backed(self, name: str, count: int, width: int = 4) -> Buffer:
        """`count` values per request on the host, which steps copy to pinned memory."""
        size = count * self.seqs * width
        return Buffer(name, pageable=size, pinned=self.steps * size)

    def staged(
        self, name: str, columns: int, count: int = 1, pinned: bool = False, **options: bool
    ) -> Buffer:
        """`count` tables of int32 or float32, a row per request, with the places of new writes."""
        size = 4 * count * self.seqs * columns
        writes = count * self.steps * 3 * 4 * self.seqs
        if pinned:
            return Buffer(name, pinned=size + writes + 4 * self.steps, **options)
        return Buffer(name, device=size, pinned=writes, **options)


def _v2_buffers(model: ModelShape, engine: EngineShape, layout: Layout) -> list[Buffer]:
    limits = engine.limits(layout)
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    width = engine.block_table_width
    mask = -(-model.vocab // 32)
    drafts = engine.num_speculative_tokens
    made = _Made(seqs, max(2, engine.steps_in_flight))
    return [
        # A drafter on the device has them there.
        made.staged("token ids", engine.max_model_len, pinned=not drafts, shared=True),
        made.backed("lengths of requests", 2),
        made.staged("computed and total lengths", 1, count=2),
        Buffer("last tokens", device=(8 + 4) * seqs),
        Buffer("input tokens", device=(4 + 8 + 1) * tokens),
        Buffer("input lengths", device=4 * (seqs + 1) + 2 * 4 * seqs),
        made.staged("block tables", width, with_kv=True),
        Buffer("block tables of a step", device=4 * seqs * width, with_kv=True),
        Buffer("slots", device=8 * tokens, with_kv=True),
        made.backed("numbers of blocks", 1),
        made.backed("sampling parameters", 4),
        made.backed("seeds", 1, width=8),
        made.backed("penalties", 3),
        Buffer("penalty counters", device=4 * seqs * (model.vocab + mask), shared=True),
        made.backed("numbers of biases", 5),
        made.staged("biases", MAX_TOKEN_IDS, count=3),
        made.staged("stop tokens", MAX_STOP_TOKEN_IDS),
        made.backed("numbers of bad words", 1),
        made.staged("bad words", MAX_TOKEN_IDS),
        made.staged("ends of bad words", MAX_BAD_WORDS + 1),
        made.backed("numbers of tokens to score", 1),
        made.staged("tokens to score", MAX_LOGPROB_TOKEN_IDS),
        Buffer("grammar bitmask", device=4 * seqs * (1 + drafts) * mask, shared=True),
        Buffer("rows of grammars", device=4 * seqs * (1 + drafts)),
        Buffer("drafts", device=2 * 8 * seqs * drafts),
        Buffer("matches of drafts", device=8 * seqs * _scanned_blocks(engine) if drafts else 0),
    ]


def _scanned_blocks(engine: EngineShape) -> int:
    """Blocks in which vLLM looks for n-grams."""
    length = engine.max_model_len
    tokens = next(size for least, size in _SCANNED.items() if length >= least)
    return -(-length // tokens)


# -------------------------------------------------------------------- Model Runner V1


def _mirrored(name: str, size: int, **options: bool) -> Buffer:
    return Buffer(name, device=size, pinned=size, mirrored=True, **options)


def _v1_buffers(model: ModelShape, engine: EngineShape, layout: Layout) -> list[Buffer]:
    limits = engine.limits(layout)
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    return [
        Buffer("token ids", pageable=(4 + 1) * seqs * engine.max_model_len),
        _mirrored("input embeddings", tokens * model.hidden * model.dtype_bytes, shared=True),
        _mirrored("input tokens", (4 + 8 + 1) * tokens),
        _mirrored("positions of queries", 8 * max(tokens, seqs + 1)),
        Buffer("positions", device=(8 + 1) * tokens),
        _mirrored("input lengths", 4 * (seqs + 1) + (5 * 4 + 8 + 1) * seqs),
        Buffer("lengths", device=2 * 4 * seqs, pinned=4 * seqs),
        Buffer("sampled tokens", pinned=8 * seqs),
        Buffer("state of requests", pinned=5 * 4 * seqs),
        _mirrored("sampling parameters", 6 * 4 * seqs),
        _mirrored("block tables", 4 * seqs * engine.block_table_width),
        _mirrored("slots", 8 * tokens),
        *_v1_drafts(engine, seqs),
    ]


def _v1_drafts(engine: EngineShape, seqs: int) -> list[Buffer]:
    drafts = engine.num_speculative_tokens
    if not drafts:
        return []
    buffers = [Buffer("drafts", pinned=8 * seqs * drafts)]
    if engine.steps_in_flight > 1:
        buffers.append(Buffer("accepted drafts", pinned=4 * seqs))
    if engine.drafter == "ngram_gpu":
        buffers += [
            Buffer("token ids of drafts", device=4 * seqs * engine.max_model_len, shared=True),
            Buffer("lengths of drafts", device=4 * seqs, pinned=(8 + 4 + 4) * seqs),
        ]
    return buffers


# -------------------------------------------------------------------- attention


def _attention_buffers(model: ModelShape, engine: EngineShape, layout: Layout) -> list[Buffer]:
    limits = engine.limits(layout)
    seqs = limits.max_num_seqs
    if engine.attention == "FLASHINFER":
        heads = model.heads // layout.tp
        elements = limits.max_num_batched_tokens * heads * model.head_dim
        workspace = max(FLASHINFER_WORKSPACE, elements * _FLASHINFER_BYTES_PER_ELEMENT)
        pages = 4 * (seqs * engine.block_table_width + 2 * seqs + 1)
        return [
            Buffer("workspace of attention", device=workspace, shared=True, with_kv=True),
            Buffer("pages", device=pages, pageable=4 * (2 * seqs + 1), with_kv=True),
        ]
    if engine.attention == "FLASH_ATTN":
        # Of FlashAttention 3, for graphs of at most 512 requests.
        size = 4 * (1 + 4 * (-(-max(seqs, 512) // 4) * 4))
        return [Buffer("schedule of attention", device=size, with_kv=True)]
    return []
