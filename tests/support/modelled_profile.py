"""Modelled profiles: step and switch times from public figures of GPUs and models. Pure.

For planning and simulating machines that nobody measured, by a roofline. Its absolute values may be
off by tens of percent; such a profile is labelled "modelled" wherever it goes, and real steps
correct it online.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from datetime import UTC, datetime
from itertools import permutations, product

from pat_vllm.layout import Experts, Layout
from pat_vllm.modelled.gpus import GPUS, NODE_SIZE, Device, GiB, gpu_named
from pat_vllm.modelled.roofline import (
    COMPUTE_EFFICIENCY,
    EXCHANGE_EFFICIENCY,
    EXPERT_KERNELS,
    KERNEL_OVERHEAD,
    MEMORY_EFFICIENCY,
    SAMPLED_TOKEN,
    STEP_OVERHEAD,
    SWITCH_FIXED,
    Machine,
)
from pat_vllm.models.checkpoint import NamedConfig, named_config
from pat_vllm.models.layer_sizes import routing_of
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.moe_config import MoEConfig, WantedExperts
from pat_vllm.profile import Profile, StepSample, StepShape, SwitchSample
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.limits import Limits
from pat_vllm.start.memory_estimate import estimate, static_engine

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_PREFILLS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_MIXED_BATCHES = (8, 64)
_SWITCH_LIVE = (1, 4, 16, 64)
_MIXTURE_NOTE = (
    " Experts are equally popular, tokens choose them independently, and a step reads those that "
    f"are chosen; {EXPERT_KERNELS} more small kernels a layer, of {KERNEL_OVERHEAD * 1e6:.0f} "
    "microseconds."
)


def modelled_profile(
    model: str | NamedConfig,
    gpu: str,
    ranks: int,
    *,
    layouts: Iterable[int] | None = None,
    max_num_seqs: int = 256,
    draft_lengths: Iterable[int] = (),
    drafting: float = 0.0,
    experts: WantedExperts = "auto",
    static: bool = False,
) -> Profile:
    """A profile from public figures, labelled as such: of PAT's engine, or of static ones.

    Both have the memory of `memory.estimate`. A rank of PAT's engine holds the weights of the base
    layout, the narrowest, in all layouts. Weights and KV are 16-bit.

    Args:
        model: its config, or what `named_config` finds it by.
        gpu: one of `GPUS`, in any case.
        ranks: GPUs, connected as this GPU usually is.
        layouts: tensor-parallel sizes to consider; powers of two when not given. Those that cannot
            split the model, span nodes or leave no memory for KV are left out.
        max_num_seqs: of a rank; a replica's follows its ranks (`pat_vllm/start/limits.py`).
        draft_lengths: those that decode steps are modelled for beside 0.
        drafting: seconds that a drafter adds to a step in which it runs; an assumption.
        experts: of a mixture, how they lie, as PAT's option.
        static: each layout has engines of its own.

    Raises:
        ValueError: an unknown GPU or model, or no layout is possible.
    """
    model_config, name, *_ = model if isinstance(model, NamedConfig) else named_config(model)
    gpu = gpu_named(gpu)
    figures = GPUS[gpu]
    shape = ModelSize.of(model_config)
    mixture = MoEConfig.from_config(model_config)
    lengths = tuple(sorted({*draft_lengths} - {0}))
    wanted = sorted({2**i for i in range(ranks.bit_length())} if layouts is None else {*layouts})
    engine = EngineShape(
        (),
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=max(lengths, default=0),
        link=figures.link,
    )
    sizes = [tp for tp in wanted if ranks % tp == 0 and tp <= NODE_SIZE and shape.divides(tp)]
    lie: Experts | None = None
    while sizes:
        possible = tuple(Layout.of(tp, ranks) for tp in sizes)
        if mixture is not None:
            lie = mixture.resolve(experts, sizes)
        shaped = replace(engine, layouts=possible, experts=lie)
        kv_tokens = _kv_tokens(shape, shaped, figures.device, static)
        if kv_tokens[sizes[0]] > _CONTEXTS[0]:
            break
        sizes = sizes[1:]
    else:
        raise ValueError(
            f"no layout of {ranks} x {gpu} can hold {name}: of tp={wanted}, none divides the ranks "
            f"and the model's heads, stays within a node of {NODE_SIZE} and leaves memory for KV"
        )
    machine = Machine(shape, figures, lie, drafting)
    limits = {layout.tp: engine.limits(layout) for layout in possible}
    steps: list[StepSample] = []
    for layout in possible:
        for point in _shapes(kv_tokens[layout.tp], limits[layout.tp], lengths):
            seconds = float(machine.step(layout, *astuple(point)))
            steps.append(StepSample.of(layout, point, [seconds]))
    return Profile(
        kind="modelled",
        title=f"modelled: {name} on {ranks} x {gpu} ({figures.link})",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        key={
            "modelled": True,
            "model": name,
            "gpu": gpu,
            "ranks": ranks,
            "link": figures.link,
            **({"draft_lengths": [0, *lengths], "drafting": drafting} if lengths else {}),
            **({"experts": lie} if mixture else {}),
            **({"static": True} if static else {}),
        },
        ranks=ranks,
        layouts=possible,
        max_num_seqs={tp: limit.max_num_seqs for tp, limit in limits.items()},
        max_batch_tokens={tp: limit.max_num_batched_tokens for tp, limit in limits.items()},
        kv_tokens=kv_tokens,
        kv_bytes_per_token=shape.kv_bytes_per_token(1),
        experts=routing_of(model_config),
        steps=tuple(steps),
        switches=tuple(_switches(machine, possible, kv_tokens)),
        note=(
            f"Modelled, not measured. Figures of the {figures.source}: "
            f"{figures.device.memory / GiB:.0f} GiB, {figures.bandwidth / 1e9:.0f} GB/s, "
            f"{figures.flops / 1e12:.1f} TFLOPS dense 16-bit, {figures.link} "
            f"{figures.link_bandwidth / 1e9:.0f} GB/s per direction; shape of the model from its "
            f"config.json, {shape.resident_weights(1) / 1e9:.2f} billion parameters. By the model: "
            f"{MEMORY_EFFICIENCY:.0%} of the bandwidth, "
            f"{COMPUTE_EFFICIENCY:.0%} of the FLOPS, {EXCHANGE_EFFICIENCY:.0%} of the link for KV, "
            f"{STEP_OVERHEAD * 1e3:.2f} ms per step, {SAMPLED_TOKEN * 1e6:.1f} us per sampled "
            f"token, {SWITCH_FIXED:.3f} s per switch besides "
            "moving KV and weights."
            + (f" A drafter takes {drafting * 1e3:.1f} ms of a step." if lengths else "")
            + (_MIXTURE_NOTE if mixture else "")
        ),
    )


def _kv_tokens(
    model: ModelSize, engine: EngineShape, device: Device, static: bool
) -> dict[int, int]:
    """Tokens whose KV a replica has room for, by tp."""
    if not static:
        return estimate(model, engine, device).kv_tokens
    return {
        layout.tp: estimate(model, static_engine(engine, layout), device).kv_tokens[layout.tp]
        for layout in engine.layouts
    }


def _shapes(room: int, limits: Limits, draft_lengths: Iterable[int]) -> Iterator[StepShape]:
    """The grid of a layout's steps that fit in memory: decodes, prefills, both in one step, and
    decodes with each draft length, with all drafts found and with none."""
    batches = [batch for batch in _BATCHES if batch <= limits.max_num_seqs]
    prefills = [p for p in _PREFILLS if p <= min(limits.max_num_batched_tokens, room)]
    for batch in batches:
        for each in _contexts(room // batch):
            yield StepShape(batch, batch * each, each)
    for prefill in prefills:
        yield StepShape(0, 0, 0, prefill)
    for batch, prefill in product(_MIXED_BATCHES, prefills[2::2]):
        in_memory = batch * 1024 + prefill <= room
        in_step = batch + prefill <= limits.max_num_batched_tokens
        if batch <= limits.max_num_seqs and in_step and in_memory:
            yield StepShape(batch, batch * 1024, 1024, prefill)
    for k, batch in product(draft_lengths, batches):
        if batch * (1 + k) <= limits.max_num_batched_tokens:
            for each, drafts in product(_contexts(room // batch - k), (0, k * batch)):
                yield StepShape(batch, batch * each, each, drafts=drafts, k=k)


def _contexts(most: int) -> list[int]:
    """Contexts of a batch's requests; the last one fills memory, as where KV is short."""
    if most < 1:
        return []
    return [*(context for context in _CONTEXTS if context < most), min(most, _CONTEXTS[-1])]


def _switches(
    machine: Machine, layouts: Sequence[Layout], kv_tokens: Mapping[int, int]
) -> Iterator[SwitchSample]:
    """Every ordered pair of layouts, over live requests x tokens of each that fit in both."""
    for source, target in permutations(layouts, 2):
        room = min(layout.replicas * kv_tokens[layout.tp] for layout in (source, target))
        for live, each in product(_SWITCH_LIVE, _CONTEXTS[::2]):
            if live * each <= room:
                tokens = live * each
                kv, weights = machine.switch_parts(source, target, live, tokens, layouts[0])
                yield SwitchSample(
                    source=source,
                    target=target,
                    num_seqs=live,
                    tokens=tokens,
                    kv_bytes=int(machine.kv_bytes(source, target, live, tokens)),
                    seconds=SWITCH_FIXED + float(kv) + weights,
                    kv=float(kv),
                    weights=weights,
                )
