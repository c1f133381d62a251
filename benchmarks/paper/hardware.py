"""Modelled profiles: step and switch times from public figures of GPUs and models. Pure.

For planning and simulating machines that nobody measured. A roofline with explicit efficiencies:
a step takes the longer of reading memory and computing, plus communication and overheads. Its
absolute values may be off by tens of percent; such a profile is labelled "modelled" wherever it
goes, and real steps correct it online.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import permutations
from math import log2
from typing import Any, Literal

from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import Profile, StepSample, SwitchSample

Link = Literal["nvlink", "pcie"]


@dataclass(frozen=True)
class Gpu:
    """Public figures of a GPU.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second of its memory.
        flops: dense 16-bit tensor operations per second, without sparsity.
        link: what connects the GPUs of a node.
        links: bytes per second and direction, by link.
        source: where the figures come from.
    """

    memory: float
    bandwidth: float
    flops: float
    link: Link
    links: Mapping[str, float]
    source: str


_PCIE4 = 25e9
"""PCIe 4.0 x16 has 31.5 GB/s per direction; copies between GPUs reach about 25."""

_PCIE5 = 50e9
"""PCIe 5.0 x16, likewise of 63 GB/s."""

GPUS: Mapping[str, Gpu] = {
    "A40": Gpu(48e9, 696e9, 149.7e12, "pcie", {"pcie": _PCIE4}, "NVIDIA A40 datasheet"),
    "H100": Gpu(
        80e9,
        3.35e12,
        989e12,
        "nvlink",
        {"nvlink": 450e9, "pcie": _PCIE5},
        "NVIDIA H100 datasheet (SXM)",
    ),
    "H200": Gpu(
        141e9,
        4.8e12,
        989e12,
        "nvlink",
        {"nvlink": 450e9, "pcie": _PCIE5},
        "NVIDIA H200 datasheet (SXM)",
    ),
}

MODEL_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
"""The shape fields of the models' public config.json."""

MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that decode kernels reach; streaming copies reach about 0.9, the
smaller matrices of a layer somewhat less."""

COMPUTE_EFFICIENCY = 0.6
"""Share of the tensor peak that large matrix products reach at sustained clocks."""

STEP_OVERHEAD = 1e-3
"""Seconds of scheduling, sampling and output handling per step that the GPU waits for."""

KERNELS_PER_LAYER = 5
KERNEL_OVERHEAD = 4e-6
"""Per layer five kernels are too small for the roofline (two norms, rotary embedding and cache
write, activation, combining of attention splits): 3-5 microseconds each, in a CUDA graph."""

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

EXCHANGE_EFFICIENCY = 0.5
"""Share of a link that moving KV blocks reaches: pieces are small, and both ends pack them."""

ACTIVATION_BYTES = 2e9
"""Memory of a rank set aside for activations, CUDA graphs and communication buffers."""

BLOCK = 16
"""Tokens of a KV block."""

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_PREFILLS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_MIXED_BATCHES = (8, 64)
_SWITCH_LIVE = (1, 4, 16, 64)


def gpu_names() -> tuple[str, ...]:
    """GPUs that can be modelled."""
    return tuple(GPUS)


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
class _Model:
    """The sizes of a dense decoder, counted in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Model:
        needed = (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        missing = [name for name in needed if not config.get(name)]
        if missing:
            raise ValueError(
                f"the model's config has no {', '.join(missing)}; only dense decoders such as "
                f"Llama and Qwen3 can be modelled (shapes at hand: {', '.join(MODEL_SHAPES)})"
            )
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def layer_weights(self, tp: int) -> float:
        """Weights of all layers on one rank; KV projections are replicated where heads are."""
        kv_heads = max(1.0, self.kv_heads / tp)
        attention = self.hidden * self.head_dim * (2 * self.heads / tp + 2 * kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate / tp)

    def head_weights(self, tp: int) -> float:
        """Weights of the LM head on one rank."""
        return self.vocab * self.hidden / tp

    def resident_weights(self, tp: int) -> float:
        """Weights in one rank's memory, the embedding included."""
        return self.layer_weights(tp) + self.head_weights(tp) * (1 if self.tied else 2)

    def divides(self, tp: int) -> bool:
        """Whether heads, KV heads and the MLP can be split over `tp` ranks."""
        kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and self.intermediate % tp == 0 and kv


@dataclass(frozen=True)
class _Machine:
    """A model on GPUs of one kind; sizes in bytes, times in seconds."""

    model: _Model
    gpu: Gpu
    link: Link
    dtype_bytes: int

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

    def step(self, tp: int, batch: int, context: int, prefill: int) -> float:
        """A step of `batch` decodes over `context` tokens in all and of one prompt of `prefill`
        tokens, which attends to itself (causal)."""
        model, tokens = self.model, batch + prefill
        sampled = batch + (prefill > 0)
        layers, head = model.layer_weights(tp), model.head_weights(tp)
        memory = (layers + head) * self.dtype_bytes
        memory += (context + prefill) * self.kv_bytes_on_rank(tp)
        attended = context + prefill * prefill / 2
        operations = 2 * (layers * tokens + head * sampled)
        operations += 4 * model.layers * model.heads * model.head_dim / tp * attended
        reading = memory / (self.gpu.bandwidth * MEMORY_EFFICIENCY)
        computing = operations / (self.gpu.flops * COMPUTE_EFFICIENCY)
        communicating = model.layers * layer_communication(
            self.gpu, self.link, tp, tokens * model.hidden * self.dtype_bytes
        )
        launching = model.layers * KERNELS_PER_LAYER * KERNEL_OVERHEAD
        return max(reading, computing) + communicating + launching + STEP_OVERHEAD

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
            live=live,
            tokens=tokens,
            kv_bytes=kv_bytes,
            seconds=fixed + kv + weights,
            kv=kv,
            weights=weights,
        )


def modelled_profile(
    model_config: Mapping[str, Any] | str,
    gpu: str,
    ranks: int,
    *,
    layouts: Iterable[int] | None = None,
    link: Link | None = None,
    max_num_seqs: int = 256,
    max_batch_tokens: int = 8192,
    memory_fraction: float = 0.9,
    dtype_bytes: int = 2,
    node_size: int = 8,
    switch_fixed: float = 0.03,
    name: str = "",
) -> Profile:
    """A profile from public figures, labelled as such.

    Args:
        model_config: config.json of a dense decoder, or a name in `MODEL_SHAPES`.
        gpu: one of `gpu_names()`.
        ranks: GPUs.
        layouts: tensor-parallel sizes to consider; powers of two when not given. Those that cannot
            split the model, span nodes or leave no memory for KV are left out.
        link: connection of a node's GPUs; by default what the GPU usually has.
        max_num_seqs, max_batch_tokens: of a replica.
        memory_fraction: share of a GPU's memory that the engine uses.
        dtype_bytes: bytes of a weight and of a KV element.
        node_size: GPUs of a node; tensor parallelism does not span nodes.
        switch_fixed: seconds of a switch besides moving KV and weights; an assumption.
        name: of the model, for title and key.

    Raises:
        ValueError: an unknown GPU, model or link, or no layout is possible.
    """
    if isinstance(model_config, str):
        name = name or model_config
        if model_config not in MODEL_SHAPES:
            raise ValueError(
                f"model {model_config!r} is unknown; allowed are {', '.join(MODEL_SHAPES)}, or "
                "the content of a config.json"
            )
        model_config = MODEL_SHAPES[model_config]
    if gpu not in GPUS:
        raise ValueError(f"gpu {gpu!r} is unknown; allowed are {', '.join(gpu_names())}")
    figures = GPUS[gpu]
    link = link or figures.link
    if link not in figures.links:
        raise ValueError(f"link {link!r} of {gpu} is unknown; allowed are {list(figures.links)}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    name = name or _known_name(model_config)
    machine = _Machine(_Model.of(model_config), figures, link, dtype_bytes)

    wanted = sorted({2**i for i in range(ranks.bit_length())} if layouts is None else {*layouts})
    kv_tokens = {
        tp: tokens
        for tp in wanted
        if ranks % tp == 0 and tp <= node_size and machine.model.divides(tp)
        if (tokens := machine.kv_tokens(tp, memory_fraction)) > _CONTEXTS[0]
    }
    if not kv_tokens:
        raise ValueError(
            f"no layout of {ranks} x {gpu} can hold {name}: of tp={wanted}, none divides the ranks "
            f"and the model's heads, stays within a node of {node_size} and leaves memory for KV"
        )
    steps: list[StepSample] = []
    for tp, room in kv_tokens.items():
        steps += _steps(machine, tp, room, max_num_seqs, max_batch_tokens)
    return Profile(
        kind="modelled",
        title=f"modelled: {name} on {ranks} x {gpu} ({link})",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        key={
            "modelled": True,
            "model": name,
            "gpu": gpu,
            "ranks": ranks,
            "link": link,
            "dtype_bytes": dtype_bytes,
            "memory_fraction": memory_fraction,
            "node_size": node_size,
            "switch_fixed": switch_fixed,
        },
        ranks=ranks,
        layouts=tuple(kv_tokens),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=machine.kv_bytes_per_token,
        steps=tuple(steps),
        switches=tuple(_switches(machine, kv_tokens, ranks, switch_fixed)),
        note=(
            f"Modelled, not measured. Figures of the {figures.source}: "
            f"{figures.memory / 1e9:.0f} GB, {figures.bandwidth / 1e9:.0f} GB/s, "
            f"{figures.flops / 1e12:.1f} TFLOPS dense 16-bit, {link} "
            f"{figures.links[link] / 1e9:.0f} GB/s per direction; shape of the model from its "
            f"config.json. Assumed: {MEMORY_EFFICIENCY:.0%} of the bandwidth, "
            f"{COMPUTE_EFFICIENCY:.0%} of the FLOPS, {EXCHANGE_EFFICIENCY:.0%} of the link for KV, "
            f"{STEP_OVERHEAD * 1e3:.1f} ms per step, {switch_fixed:.3f} s per switch besides "
            "moving KV and weights."
        ),
    )


def _known_name(config: Mapping[str, Any]) -> str:
    for name, shape in MODEL_SHAPES.items():
        if all(config.get(field) == value for field, value in shape.items()):
            return name
    return str(config.get("_name_or_path") or config.get("model_type") or "model")


def _steps(
    machine: _Machine, tp: int, room: int, max_num_seqs: int, max_batch_tokens: int
) -> Iterable[StepSample]:
    """The grid of decode steps that fit in memory, prefills, and both in one step."""

    def sample(batch: int, each: int, prefill: int = 0) -> StepSample:
        seconds = machine.step(tp, batch, batch * each, prefill)
        return StepSample(
            tp=tp,
            batch=batch,
            context=batch * each,
            longest=each if batch else 0,
            prefill=prefill,
            seconds=seconds,
            low=seconds,
            high=seconds,
            repeats=1,
        )

    prefills = [p for p in _PREFILLS if p <= min(max_batch_tokens, room)]
    for batch in _BATCHES:
        if batch <= max_num_seqs:
            yield from (sample(batch, each) for each in _CONTEXTS if batch * each <= room)
    yield from (sample(0, 0, prefill) for prefill in prefills)
    for batch in _MIXED_BATCHES:
        for prefill in prefills[2::2]:
            fits = batch + prefill <= max_batch_tokens and batch * 1024 + prefill <= room
            if batch <= max_num_seqs and fits:
                yield sample(batch, 1024, prefill)


def _switches(
    machine: _Machine, kv_tokens: Mapping[int, int], ranks: int, fixed: float
) -> Iterable[SwitchSample]:
    """Every ordered pair of layouts, over live requests x tokens of each that fit in both."""
    for source, target in permutations([Layout.of(tp, ranks) for tp in kv_tokens], 2):
        room = min(one.replicas * kv_tokens[one.tp] for one in (source, target))
        for live in _SWITCH_LIVE:
            for each in _CONTEXTS[::2]:
                if live * each <= room:
                    yield machine.switch(source, target, live, live * each, fixed)
