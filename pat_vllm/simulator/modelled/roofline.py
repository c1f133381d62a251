"""What a step and a switch take on given hardware, by a roofline. Pure.

A step takes the longer of reading memory and computing, plus communication and overheads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from pat_vllm.layout import Layout
from pat_vllm.model_size import ModelSize
from pat_vllm.profiling.profile import SwitchSample
from pat_vllm.simulator.modelled.figures import (
    ACTIVATION_BYTES,
    ALL_REDUCE_EFFICIENCY,
    ALL_REDUCE_LATENCY,
    ALL_REDUCES_PER_LAYER,
    BLOCK,
    COMPUTE_EFFICIENCY,
    EXCHANGE_EFFICIENCY,
    KERNEL_OVERHEAD,
    KERNELS_PER_LAYER,
    MEMORY_EFFICIENCY,
    STEP_OVERHEAD,
    Gpu,
    Link,
)


def layer_communication(gpu: Gpu, link: Link, tp: int, size: float) -> float:
    """Seconds that a layer's all-reduces take, of activations of `size` bytes.

    Ring all-reduces: latency, and 2 (tp - 1) / tp times the bytes over the link.
    """
    if tp == 1:
        return 0.0
    fixed, per_doubling = ALL_REDUCE_LATENCY[link]
    rate = gpu.links[link] * ALL_REDUCE_EFFICIENCY[link]
    one = fixed + per_doubling * log2(tp) + size * 2 * (tp - 1) / tp / rate
    return ALL_REDUCES_PER_LAYER * one


@dataclass(frozen=True)
class Machine:
    """A model on GPUs of one kind; sizes in bytes, times in seconds.

    Attributes:
        drafting: seconds that a drafter adds to a step in which it runs; an assumption.
    """

    model: ModelSize
    gpu: Gpu
    link: Link
    dtype_bytes: int
    drafting: float = 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers and KV heads."""
        model = self.model
        return 2 * model.layers * model.kv_heads * model.head_dim * self.dtype_bytes

    def kv_bytes_on_rank(self, tp: int) -> float:
        """Of a token, on one rank; heads are replicated when there are fewer than ranks."""
        return self.kv_bytes_per_token / min(tp, self.model.kv_heads)

    def kv_tokens(self, tp: int, memory_fraction: float) -> int:
        """Tokens whose KV fits beside the weights; 0 when not even these do."""
        weights = self.model.resident_weights(tp) * self.dtype_bytes
        left = memory_fraction * self.gpu.memory - ACTIVATION_BYTES - weights
        return max(0, int(left / self.kv_bytes_on_rank(tp)) // BLOCK * BLOCK)

    def step(
        self, tp: int, batch: int, context: int, prefill: int, drafts: int = 0, k: int = 0
    ) -> float:
        """A step of `batch` decodes over `context` tokens in all and of one prompt of `prefill`
        tokens, which attends to itself (causal).

        It verifies `drafts` draft tokens of all decodes together. Each is a token to compute and to
        sample, and attends to its request's context, whose KV is read once for all of them. With a
        draft length `k` the drafter runs.
        """
        model, tokens = self.model, batch + drafts + prefill
        sampled = batch + drafts + (prefill > 0)
        layers, head = model.layer_weights(tp), model.head_weights(tp)
        memory = (layers + head) * self.dtype_bytes
        memory += (context + prefill) * self.kv_bytes_on_rank(tp)
        attended = prefill * prefill / 2
        attended += context * (1 + drafts / batch) if batch else 0
        operations = 2 * (layers * tokens + head * sampled)
        operations += 4 * model.layers * model.heads * model.head_dim / tp * attended
        reading = memory / (self.gpu.bandwidth * MEMORY_EFFICIENCY)
        computing = operations / (self.gpu.flops * COMPUTE_EFFICIENCY)
        communicating = model.layers * layer_communication(
            self.gpu, self.link, tp, tokens * model.hidden * self.dtype_bytes
        )
        launching = model.layers * KERNELS_PER_LAYER * KERNEL_OVERHEAD
        drafting = self.drafting if k else 0.0
        return max(reading, computing) + communicating + launching + STEP_OVERHEAD + drafting

    def moved(self, source: Layout, target: Layout) -> float:
        """KV bytes per token that change ranks, over all ranks: what a target rank needs and does
        not hold, averaged over the replicas that a request may come from and go to."""
        heads = self.model.kv_heads
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
        return self.kv_bytes_per_token / heads * total / pairs

    def switch(
        self, source: Layout, target: Layout, live: int, tokens: int, fixed: float
    ) -> SwitchSample:
        """Move the KV of `live` requests with `tokens` tokens in all, and permute the weights in
        place: each rank reads and writes its target shard once."""
        kv_bytes = int(tokens * self.moved(source, target))
        senders = min(live, source.replicas) * source.tp
        receivers = min(live, target.replicas) * target.tp
        link = self.gpu.links[self.link] * EXCHANGE_EFFICIENCY
        kv = kv_bytes / max(1, min(senders, receivers)) / link
        shard = self.model.resident_weights(target.tp) * self.dtype_bytes
        weights = 2 * shard / (self.gpu.bandwidth * MEMORY_EFFICIENCY)
        return SwitchSample(
            source=source.tp,
            target=target.tp,
            num_seqs=live,
            tokens=tokens,
            kv_bytes=kv_bytes,
            seconds=fixed + kv + weights,
            kv=kv,
            weights=weights,
        )
