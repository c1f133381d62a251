"""What vLLM's model runners keep allocated, and what of it layouts share. Pure.

Sizes are those of vLLM 0.32: `v1/worker/gpu_model_runner.py` and `gpu_input_batch.py` (V1),
`v1/worker/gpu/` (V2). Each buffer is counted that has more than 5 MiB in an engine of a model of 8
to 32 billion parameters; what is smaller is summed up by request and by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pat_vllm.config import PATConfig
from pat_vllm.layout import Experts, Layout
from pat_vllm.modelled.gpus import Link, MiB
from pat_vllm.models.drafter_size import DrafterSize
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.tower_size import LARGEST_IMAGE, TowerSize
from pat_vllm.start.limits import Limits, layout_limits

FLASHINFER_WORKSPACE = 394 * MiB
"""Bytes that FlashInfer's attention takes at least (`VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE`)."""
_FLASHINFER_BYTES_PER_ELEMENT = 16
"""Bytes of its workspace for each element of a step's queries, where that is more."""
_SAMPLING = 4 * (4 * 1024 + 3 * 128)
"""Bytes for a request's sampling (V2), 4 for each token: allowed tokens, biased ones with their
biases and those of bad words, at most 1024 of each; stop tokens, ends of bad words and tokens to
score, at most 128 of each."""
_TOKEN_BYTES = 40
"""Bytes for a token of a step: its id, position, slot and the like."""


@dataclass(frozen=True)
class EngineShape:
    """The options of an engine that memory depends on; vLLM's names where it has them.

    Attributes:
        layouts: the base layout first; a static engine has one.
        pat: PAT's options, of which the limits depend on some.
        kv_cache_memory_bytes: a rank's KV cache, in place of what `gpu_memory_utilization` leaves.
        enforce_eager: there are no CUDA graphs.
        runner: vLLM's model runner, V2 by default on CUDA.
        weights, experts: PAT's options, resolved.
        migrates: whether switches carry KV between ranks.
        attention: the backend, where it keeps large buffers.
        num_speculative_tokens: the most draft tokens; 0 without speculation.
        drafter: what makes them, if it has weights.
        tower: that of a class that takes images; None: the engine takes text alone.
        link: what connects the GPUs; None: not known.
    """

    layouts: tuple[Layout, ...]
    pat: PATConfig = field(default_factory=PATConfig)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 32768
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = False
    runner: Literal["V1", "V2"] = "V2"
    weights: Literal["inplace", "materialized"] = "inplace"
    experts: Experts | None = None
    migrates: bool = True
    attention: Literal["FLASH_ATTN", "FLASHINFER", "CPU_ATTN"] = "FLASH_ATTN"
    num_speculative_tokens: int = 0
    drafter: DrafterSize | None = None
    tower: TowerSize | None = None
    link: Link | None = None

    def encoder_tokens(self, layout: Layout) -> int:
        """Tokens of images that a replica of a layout encodes at once, and keeps."""
        largest = min(LARGEST_IMAGE, self.max_model_len)
        return max(self.limits(layout).max_num_batched_tokens, largest)

    def limits(self, layout: Layout) -> Limits:
        """What a replica of a layout runs at once."""
        given = Limits(self.max_num_seqs, self.max_num_batched_tokens)
        return layout_limits(layout, given, self.pat, 1 + self.num_speculative_tokens, self.link)


@dataclass(frozen=True)
class Buffer:
    """Something that a model runner allocates once. Bytes.

    Attributes:
        device: memory of the device.
        pinned: host memory that the device can read. If a buffer has both, one is a copy of the
            other.
        pageable: other host memory.
        shared: the layouts have it in common; the largest counts.
        with_kv: allocated with the KV cache, after vLLM has measured what a layout takes.
    """

    device: int = 0
    pinned: int = 0
    pageable: int = 0
    shared: bool = False
    with_kv: bool = False

    @property
    def on_cpu(self) -> int:
        """Bytes that it takes where the device is the CPU, which needs no copy."""
        return max(self.device, self.pinned) + self.pageable


def runner_buffers(model: ModelSize, engine: EngineShape, layout: Layout) -> list[Buffer]:
    """What the model runner of a layout keeps."""
    limits = engine.limits(layout)
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    drafts = engine.num_speculative_tokens
    # Ids of tokens and of blocks have 4 bytes.
    token_ids = 4 * seqs * engine.max_model_len
    table = 4 * seqs * -(-engine.max_model_len // engine.block_size)
    small = _TOKEN_BYTES * tokens
    # Beside one with weights they look only if they may look into earlier responses, too.
    searched = drafts and (engine.drafter is None or engine.pat.draft_history_bytes)
    if engine.runner == "V2":
        mask = -(-model.vocab // 32)
        buffers = [
            # Token ids, in which drafters of text look on the device.
            Buffer(token_ids if searched else 0, 0 if searched else token_ids, shared=True),
            # Penalties: a counter and a bit for each token of the vocabulary.
            Buffer(4 * seqs * (model.vocab + mask), shared=True),
            # The bitmask of grammars.
            Buffer(4 * seqs * (1 + drafts) * mask, shared=True),
            # Two block tables: of all requests, and of those of a step.
            Buffer(2 * table, with_kv=True),
            Buffer(seqs * _SAMPLING + small),
        ]
    else:
        embeddings = tokens * model.hidden * model.dtype_bytes
        buffers = [
            Buffer(embeddings, embeddings, shared=True),
            Buffer(token_ids if drafts and engine.drafter is None else 0, shared=True),
            Buffer(table, table),
            Buffer(small, small, pageable=5 * token_ids // 4),
        ]
    if engine.drafter is not None:
        # The hidden states that it begins with; on V1 embeddings, too.
        states = tokens * engine.drafter.model.hidden * model.dtype_bytes
        if engine.runner == "V2":
            buffers.append(Buffer(states + tokens * (4 + 8)))  # an id and a position for each
        else:
            # An id, a position, a slot and a number for each.
            buffers += [Buffer(2 * states, shared=True), Buffer(tokens * (4 + 8 + 8 + 4))]
    if engine.tower is not None:
        # What a step is given in place of ids (V1 has it for all models), and of deepstack.
        rows = engine.tower.levels + (engine.runner == "V2")
        buffers.append(Buffer(rows * tokens * model.hidden * model.dtype_bytes, shared=True))
        if (axes := engine.tower.axes) > 1:
            # Positions of a step, and (V2) of prompts.
            of_prompts = axes * token_ids if engine.runner == "V2" else 0
            of_step = 8 * axes * tokens
            buffers.append(Buffer(0, of_prompts, shared=True))
            buffers.append(Buffer(of_step, of_step if engine.runner == "V1" else 0))
    if engine.attention == "FLASHINFER":
        elements = tokens * (model.heads // layout.tp) * model.head_dim
        workspace = max(FLASHINFER_WORKSPACE, elements * _FLASHINFER_BYTES_PER_ELEMENT)
        buffers += [Buffer(workspace, shared=True, with_kv=True), Buffer(table, with_kv=True)]
    if size := model.latent_workspace_bytes(engine.max_model_len, seqs, engine.block_size):
        buffers.append(Buffer(size, shared=True, with_kv=True))
    if size := model.expert_workspace_bytes(layout.tp, engine.experts == "ep", tokens):
        # A process has one workspace for experts, which grows until the first graph is captured.
        buffers.append(Buffer(0 if engine.attention == "CPU_ATTN" else size, shared=True))
    return buffers


def all_buffers(model: ModelSize, engine: EngineShape) -> list[list[Buffer]]:
    """Buffers that each layout has to itself; the base layout's list has the shared ones, too."""
    every = [runner_buffers(model, engine, layout) for layout in engine.layouts]
    # The runners of all layouts make the same buffers, in the same order.
    shared = [
        max(alike, key=lambda buffer: buffer.device + buffer.pinned)
        for alike in zip(*every, strict=True)
        if alike[0].shared
    ]
    own = [[buffer for buffer in buffers if not buffer.shared] for buffers in every]
    return [shared + own[0], *own[1:]]
