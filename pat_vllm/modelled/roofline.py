"""What a step and a switch take on given hardware, by a roofline. Pure.

A step takes reading memory and computing, of which the longer hides most of the other, plus
communication and overheads. Figures that say so are fitted to steps of Qwen3-8B on one H100
(`benchmarks/profiles/`), which a test holds the model to; on other GPUs, and for what one GPU does
not do, they are assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pat_vllm.layout import Experts, Layout
from pat_vllm.modelled.expert_load import busiest, hot_experts
from pat_vllm.modelled.gpus import Gpu
from pat_vllm.models.drafter_size import DrafterSize, with_kv_of
from pat_vllm.models.model_size import ModelSize
from pat_vllm.predictor.planner import SwitchSeconds
from pat_vllm.predictor.state import Floats

MEMORY_EFFICIENCY = 0.92
"""Share of the memory bandwidth at which weights and KV are read: fitted."""

COMPUTE_EFFICIENCY = 0.79
"""Share of the tensor peak that large matrix products reach: fitted."""

OVERLAP = 2.3
"""Reading (r) and computing (c) hide each other in part: together they take (r^q + c^q)^(1/q), with
this q. An infinite q would be the longer of the two, 1 their sum. Fitted."""

STEP_OVERHEAD = 1.25e-3
"""Seconds per step in which the GPU waits for scheduling, sampling and output handling: fitted."""

SAMPLED_TOKEN = 5.3e-6
"""Seconds more per token sampled, of a vocabulary of 152 thousand: fitted, to torch's sampling."""

KERNELS_PER_LAYER = 5
KERNEL_OVERHEAD = 4e-6  # seconds
"""In each layer five kernels are too small for the roofline (two norms, rotary embedding and cache
write, activation, combining of attention splits): 3-5 microseconds each, in a CUDA graph."""

EXPERT_KERNELS = 4
"""More of such kernels in a layer with experts: the router's product, the choice of experts, the
sorting of tokens by them, the sum of what they give. Counted in vLLM's Triton
experts; their times are an assumption."""

ALL_REDUCE_LATENCY: Mapping[str, tuple[float, float]] = {
    "nvlink": (6e-6, 2e-6),
    "pcie": (15e-6, 25e-6),
}
"""Seconds of a small all-reduce, and more for each doubling of the ranks: 8 to 12 microseconds for
2 to 8 ranks over NVSwitch (one-shot kernels), 40 to 90 over PCIe (a ring through host memory)."""

ALL_REDUCE_EFFICIENCY: Mapping[str, float] = {"nvlink": 0.4, "pcie": 0.5}
"""Share of a link that an all-reduce of about a megabyte reaches: too small to fill NVLink, and
over PCIe neighbours share bridges."""

ALL_REDUCES_PER_LAYER = 2
"""One after attention, one after the MLP (Megatron-style tensor parallelism)."""

SWITCH_FIXED = 0.03
"""Seconds of a switch besides moving KV and weights; an assumption."""

EXCHANGE_EFFICIENCY = 0.5
"""Share of a link that moving KV blocks reaches: pieces are small, and both ends pack them."""


def _layer_communication(gpu: Gpu, tp: int, size: Floats) -> Floats | float:
    """Seconds that a layer's all-reduces take, of activations of `size` bytes.

    Ring all-reduces: latency, and 2 (tp - 1) / tp times the bytes over the link.
    """
    if tp == 1:
        return 0.0
    fixed, per_doubling = ALL_REDUCE_LATENCY[gpu.link]
    rate = gpu.link_bandwidth * ALL_REDUCE_EFFICIENCY[gpu.link]
    all_reduce = fixed + per_doubling * log2(tp) + size * 2 * (tp - 1) / tp / rate
    return ALL_REDUCES_PER_LAYER * all_reduce


class _Work(NamedTuple):
    """What a pass computes, as the arguments of `Machine.step`."""

    batch: Floats
    context: Floats
    prefill: Floats
    drafts: Floats


@dataclass(frozen=True)
class Machine:
    """A model on GPUs of one kind; sizes in bytes, times in seconds.

    Attributes:
        experts: how the experts of a mixture lie (`layout.Experts`); None: there are none.
        drafting: seconds that a drafter of text adds to a step in which it runs; an assumption.
        drafter: a drafter with weights.
    """

    model: ModelSize
    gpu: Gpu
    experts: Experts | None = None
    drafting: float = 0.0
    drafter: DrafterSize | None = None

    def expert_load(self, layout: Layout, tokens: Floats) -> tuple[Floats, Floats]:
        """In a mixture of experts: what a layer's busiest rank has to do, as in `ExpertLoad`.

        With cut experts every rank has a part of each, so all have the same to do.
        """
        experts = self.model.experts
        assert experts is not None
        if self.experts != "ep" or layout.tp == 1:
            each = tokens * experts.per_token / layout.tp
            return hot_experts(experts, tokens) / layout.tp, each
        counts, place = np.unique(np.rint(tokens).astype(int), return_inverse=True)
        loads = np.array([busiest(experts, int(count), layout.tp) for count in counts])
        hot, work = loads.T[:, place.reshape(np.shape(tokens))]
        return hot, work

    def step(
        self,
        layout: Layout,
        batch: ArrayLike,
        context: ArrayLike,
        longest: ArrayLike = 0,
        prefill: ArrayLike = 0,
        busy: ArrayLike = 1,
        drafts: ArrayLike = 0,
        k: ArrayLike = 0,
    ) -> Floats:
        """Seconds of steps of `batch` decodes over `context` tokens in all and of one prompt of
        `prefill` tokens, which attends to itself (causal).

        A step verifies `drafts` draft tokens of all decodes together. Each is a token to compute
        and to sample, and attends to its request's context, whose KV is read once for all of them.
        With a draft length `k` the drafter runs. One with weights makes a pass over the step's
        tokens at any `k`, and for each draft after the first another over one token of each
        request, all with its head.

        Of a mixture, a rank reads the experts that some token goes to, once.

        The arguments broadcast, and may be fractional. Neither the longest context nor how many
        replicas are busy matters here.
        """
        batch, context, prefill, drafts, k = (
            np.asarray(value, np.float64) for value in (batch, context, prefill, drafts, k)
        )
        work, sampled = _Work(batch, context, prefill, drafts), batch + drafts + (prefill > 0)
        passing = self._pass(layout, work, sampled) + self._drafting(layout, work, k)
        return np.asarray(passing + STEP_OVERHEAD + sampled * SAMPLED_TOKEN)

    def _drafting(self, layout: Layout, work: _Work, k: Floats) -> Floats:
        """Seconds of what makes the next drafts."""
        if self.drafter is None:
            return np.asarray(self.drafting * (k > 0), np.float64)
        own = replace(self, model=self.drafter.model, drafter=None)
        joining, none = self.drafter.joining(layout.tp), np.zeros(())
        first = own._pass(layout, work, work.batch + (work.prefill > 0), joining)
        of_one = work._replace(prefill=none, drafts=none)
        return first + np.maximum(k - 1, 0) * own._pass(layout, of_one, work.batch, joining)

    def _pass(self, layout: Layout, step: _Work, sampled: Floats, more: float = 0.0) -> Floats:
        """Seconds of the model's layers, and of its head for the tokens that are sampled.

        Args:
            more: weights that every token needs beside the model's.
        """
        batch, context, prefill, drafts = step
        model, tokens, tp = self.model, batch + drafts + prefill, layout.tp
        prompts = prefill > 0
        layers, head = model.layer_weights(tp), model.head_weights(tp)
        some = np.maximum(batch, 1.0)
        seen = context * model.kv_share(context / some)
        memory = model.layer_bytes(tp) + (head + more) * model.dtype_bytes
        # Decoding reads these in place of the weights that they are copies of.
        memory = memory + model.absorbed_bytes(tp) * (1 - model.matrix_bytes / model.dtype_bytes)
        memory = memory + (seen + prefill) * model.kv_bytes_per_token(tp)
        attention = prefill * prefill / 2 * model.attention_operations(tp, decode=False)
        attended = seen * (1 + drafts / some)
        attention = attention + attended * model.attention_operations(tp, decode=True)
        # As many operations in 16 bits as take the time of those in 8.
        share = self.gpu.flops / self.gpu.fp8_flops if model.quantized.weight_bytes else 1.0
        operations = 2 * ((share * layers + more) * tokens + head * sampled)
        operations = operations + model.attention_layers * attention
        if model.linear is not None:
            # A state is read and written once for all of a request's tokens, whatever its context.
            memory = memory + 2 * (batch + prompts) * model.state_bytes(tp)
            operations = operations + 8 * model.linear.layers * model.linear.matrix / tp * tokens
        launching = model.depth * KERNELS_PER_LAYER * KERNEL_OVERHEAD
        if model.experts is not None:
            hot, work = self.expert_load(layout, tokens)
            memory = memory + hot * model.expert_weights * model.matrix_bytes
            operations = operations + 2 * share * work * model.expert_weights
            launching += model.experts.layers * EXPERT_KERNELS * KERNEL_OVERHEAD
        reading = memory / (self.gpu.bandwidth * MEMORY_EFFICIENCY)
        computing = operations / (self.gpu.flops * COMPUTE_EFFICIENCY)
        size = tokens * model.hidden * model.dtype_bytes
        communicating = model.depth * _layer_communication(self.gpu, tp, size)
        working = (reading**OVERLAP + computing**OVERLAP) ** (1 / OVERLAP)
        return np.asarray(working + communicating + launching)

    def moved(self, source: Layout, target: Layout) -> float:
        """Bytes of KV per token that change ranks, over all ranks."""
        heads = self.model.kv_heads
        of_token = with_kv_of(self.model, self.drafter).kv_bytes_per_token(1)
        return of_token / heads * _moved_heads(source, target, heads)

    def moved_states(self, source: Layout, target: Layout) -> float:
        """Bytes per request that change ranks beside its KV, over all ranks."""
        if self.model.linear is None:
            return 0.0
        heads = self.model.linear.keys
        return self.model.state_bytes(1) / heads * _moved_heads(source, target, heads)

    def moved_experts(self, source: Layout, target: Layout, base: Layout) -> float:
        """Number of experts' weights that move within a rank, from one layout to another.

        A cut expert's part has rows of gate and up, which lie apart in the loaded weight: rows of
        up move next to those of gate, and as many make room. Whole experts, and those of the base
        layout, lie as they were loaded.
        """
        if self.model.experts is None or self.experts == "ep":
            return 0.0
        experts = self.model.experts
        share = sum(1 / layout.tp for layout in (source, target) if layout != base)
        return experts.layers * experts.count * 2 * experts.intermediate * self.model.hidden * share

    def switch(self, base: Layout) -> SwitchSeconds:
        """Seconds of switches of an engine with that base layout.

        A switch moves the KV of the live requests, and their states, and permutes the weights in
        place: each rank reads and writes its target shard once, and of experts what moves. A
        drafter's weights, a layer's, are left out.
        """

        def seconds(source: Layout, target: Layout, live: Floats, tokens: Floats) -> Floats:
            kv, weights = self.switch_parts(source, target, live, tokens, base)
            return SWITCH_FIXED + kv + weights

        return seconds

    def kv_bytes(
        self, source: Layout, target: Layout, live: Floats | int, tokens: Floats | int
    ) -> Floats | float:
        """Bytes of KV and states that a switch moves."""
        return tokens * self.moved(source, target) + live * self.moved_states(source, target)

    def switch_parts(
        self, source: Layout, target: Layout, live: Floats | int, tokens: Floats | int, base: Layout
    ) -> tuple[Floats, float]:
        """Seconds to move KV and states of `live` requests with `tokens` tokens in all, and
        weights."""
        kv_bytes = self.kv_bytes(source, target, live, tokens)
        senders = np.minimum(live, source.replicas) * source.tp
        receivers = np.minimum(live, target.replicas) * target.tp
        link = self.gpu.link_bandwidth * EXCHANGE_EFFICIENCY
        kv = kv_bytes / np.maximum(1, np.minimum(senders, receivers)) / link
        shard = self.model.resident_bytes(target.tp)
        if self.model.experts is not None:
            moved = self.moved_experts(source, target, base)
            shard = self.model.layer_bytes(target.tp) + moved * self.model.matrix_bytes
        weights = 2 * shard / (self.gpu.bandwidth * MEMORY_EFFICIENCY)
        return kv, weights


@lru_cache(maxsize=1024)
def _moved_heads(source: Layout, target: Layout, heads: int) -> float:
    """Heads of a request that change ranks, over all ranks: what a target rank needs and does not
    hold, averaged over the replicas that a request may come from and go to."""
    total = pairs = 0
    for old in range(source.replicas):
        held = {
            rank: set(source.kv_heads_of(source.tp_rank_of(rank), heads))
            for rank in source.ranks_of(old)
        }
        for new in {target.replica_of(rank) for rank in held}:
            pairs += 1
            for rank in target.ranks_of(new):
                needed = set(target.kv_heads_of(target.tp_rank_of(rank), heads))
                total += len(needed - held.get(rank, set()))
    return total / pairs
