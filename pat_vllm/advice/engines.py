"""The engines that are compared: static ones of each layout, and PAT's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pat_vllm.config import PATConfig
from pat_vllm.files.reading import shown
from pat_vllm.layout import Experts, Layout
from pat_vllm.modelled.gpus import GPUS, NODE_SIZE, gpu_named
from pat_vllm.modelled.roofline import Machine
from pat_vllm.models.checkpoint import NamedConfig, NamedDrafter, named_drafter
from pat_vllm.models.drafter_size import DrafterSize
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.moe_config import MoEConfig
from pat_vllm.models.quantization import FP8_KV, FP8_ONLINE, Quantized, quantization_of
from pat_vllm.models.tower_size import TowerSize
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.planner import Planner
from pat_vllm.predictor.steps.step_time import StepTimeModel
from pat_vllm.predictor.whole_batch import Batch, StaticEngines
from pat_vllm.profile import Profile
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.choice import choose
from pat_vllm.start.load import Load
from pat_vllm.start.memory_estimate import estimate, static_engine

if TYPE_CHECKING:
    from pat_vllm.cli.advise import AdviseOptions

_DTYPES = ("quantization", "kv_cache_dtype")
DRAFTER = "DRAFTER"
"""Stands for the checkpoint of a drafter that a profile was measured with."""
DRAFT_LENGTHS = (0, 1, 2, 4, 7)
"""Those that an engine with `num_speculative_tokens` 7 keeps ready."""
LENGTHS_OF_WEIGHTS = DRAFT_LENGTHS[:-1]
"""With a drafter with weights: each draft takes a pass, so that fewer are worth it."""


@dataclass(frozen=True)
class Engines:
    """What batches are planned for.

    Attributes:
        title: model and machine.
        modelled: whether times come from public figures of the GPU; else they were measured.
        static: engines of each layout that has room for the longest request.
        planner: of PAT's engine.
        ranks: of PAT's engine.
        draft_lengths: among which PAT chooses; 0 alone without drafts.
        options: of PAT's that name the layouts.
        warning: what an engine with these layouts would warn of.
        experts: how the experts of a mixture lie in static engines; None: there are none.
        text_only: whether the model has more than text, of which PAT serves the text alone.
        dtypes: vLLM's `quantization` and `kv_cache_dtype` of all engines, as far as they are set.
        drafter: of all engines; None: n-grams, or no drafts.
    """

    title: str
    modelled: bool
    static: tuple[StaticEngines, ...]
    planner: Planner
    ranks: int
    draft_lengths: tuple[int, ...]
    options: Mapping[str, object]
    warning: str | None = None
    experts: Experts | None = None
    text_only: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    drafter: NamedDrafter | None = None


def profiled_engines(profile: Profile, drafts: bool) -> Engines:
    """Those of a profile, each with the memory of PAT's engine."""
    step = StepTimeModel.fit(profile).seconds
    planner = Planner(
        profile.layouts,
        step,
        CostModel().fit(profile).seconds,
        max_num_seqs=profile.max_num_seqs,
        kv_tokens=profile.kv_tokens,
    )
    lengths = {0} | {s.k for s in profile.steps if drafts and s.k in DRAFT_LENGTHS}
    sizes = [layout.tp for layout in profile.layouts]
    experts = profile.key.get("experts") if profile.experts else None
    drafter = None
    if profile.drafter_has_weights:
        method = str(profile.key["speculation"]["method"])
        drafter = NamedDrafter(method, {}, "" if method == "mtp" else DRAFTER)
    return Engines(
        title=profile.title,
        modelled=profile.kind == "modelled",
        static=tuple(
            StaticEngines(
                layout, step, profile.max_num_seqs[layout.tp], profile.kv_tokens[layout.tp]
            )
            for layout in profile.layouts
        ),
        planner=planner,
        ranks=profile.ranks,
        draft_lengths=tuple(sorted(lengths)),
        options={
            "base_tp": sizes[0],
            "layouts": sizes,
            **({"experts": experts} if profile.experts else {}),
        },
        experts="ep" if experts == "ep" else "tp" if profile.experts else None,
        dtypes=_set({name: profile.key.get(name) for name in _DTYPES}),
        drafter=drafter,
    )


def modelled_engines(
    options: AdviseOptions,
    model: NamedConfig,
    first: Batch,
    acceptance: float,
    longest: int,
    gpu_memory_utilization: float = EngineShape.gpu_memory_utilization,
) -> Engines:
    """Engines on --gpu, PAT's with the layouts that it would choose for such a batch.

    Args:
        first: one of the batches.
        acceptance: mean probability that a draft of it is accepted.
        longest: tokens of the longest request that may come.
        gpu_memory_utilization: vLLM's option.

    Raises:
        ValueError: an option is wrong, or a request has no room.
    """
    assert options.gpu is not None
    quantized, ranks = _quantized(options, model), options.gpus
    size = ModelSize.of(model.fields, quantized=quantized)
    dtypes = _set({name: getattr(options, name) for name in _DTYPES})
    name = gpu_named(options.gpu)
    gpu = GPUS[name]
    _check_ranks(size, model.name, ranks)
    drafter = named_drafter(options.drafter) if options.drafter else None
    tower = model.with_tower
    of_drafter = DrafterSize.of(drafter.method, size, drafter.fields) if drafter else None
    lengths: tuple[int, ...] = (0,)
    if acceptance:
        lengths = LENGTHS_OF_WEIGHTS if drafter else DRAFT_LENGTHS
    shape = EngineShape(
        (),
        max_num_seqs=options.max_num_seqs,
        max_model_len=longest,
        gpu_memory_utilization=gpu_memory_utilization,
        num_speculative_tokens=lengths[-1],
        drafter=of_drafter,
        tower=TowerSize.of(tower) if tower else None,
        link=gpu.link,
    )
    of_dtypes = "".join(f", {option}={value}" for option, value in dtypes.items())
    with_drafter = f", {drafter.method} drafts" if drafter else ""
    title = f"{model.name} on {ranks} x {name} ({gpu.link}){of_dtypes}{with_drafter}"
    mixture = MoEConfig.from_config(model.fields)
    sizes = [tp for tp in range(1, ranks + 1) if ranks % tp == 0 and size.divides(tp)]
    sizes = [tp for tp in sizes if tp & (tp - 1) == 0 or tp == ranks]
    experts = None if mixture is None else mixture.resolve("auto", sizes)
    machine = Machine(size, gpu, experts, options.drafting, of_drafter)
    layouts = [Layout.of(tp, ranks) for tp in sizes]
    static = _static_engines(machine, replace(shape, experts=experts), layouts)
    if not static:
        raise ValueError(
            f"{title}: no layout has memory for a request of {longest:,} tokens; name more GPUs of "
            f"a node (--gpus 2 to {NODE_SIZE}), or shorter responses (--max-tokens)"
        )
    load = load_of(first, acceptance)
    choice = choose(
        model.fields,
        PATConfig(),
        shape,
        ranks,
        gpu.device,
        quantized=quantized,
        drafter=(drafter.method, drafter.fields) if drafter else None,
        tower=tower,
        load=load,
    )
    engine = replace(shape, layouts=choice.layouts, experts=choice.experts)
    machine = replace(machine, experts=choice.experts)
    planner = Planner(
        choice.layouts,
        machine.step,
        machine.switch(choice.layouts[0]),
        max_num_seqs={layout.tp: shape.limits(layout).max_num_seqs for layout in choice.layouts},
        kv_tokens=estimate(size, engine, gpu.device).kv_tokens,
    )
    return Engines(
        title=title,
        modelled=True,
        static=static,
        planner=planner,
        ranks=ranks,
        draft_lengths=lengths,
        options=choice.options,
        warning=choice.warning,
        experts=experts,
        text_only=model.text_only,
        dtypes=dtypes,
        drafter=drafter,
    )


def _set(options: Mapping[str, Any]) -> dict[str, str]:
    """Those that say something."""
    return {name: str(value) for name, value in options.items() if value not in (None, "auto")}


def _quantized(options: AdviseOptions, model: NamedConfig) -> Quantized:
    """What the engines keep in 8 bits.

    Raises:
        ValueError: an option has a value that PAT or the checkpoint does not have.
    """
    own = quantization_of(model.fields)
    for name, value, allowed in (
        ("quantization", options.quantization, (None, own) if own else (None, *FP8_ONLINE)),
        ("kv-cache-dtype", options.kv_cache_dtype, ("auto", *FP8_KV)),
    ):
        if value not in allowed:
            of = f", as {model.name} is" if own and name == "quantization" else ""
            names = ", ".join(filter(None, allowed))
            raise ValueError(f"--{name} is {shown(value)}; allowed is {names}{of}")
    return Quantized.of(model.fields, options.quantization, options.kv_cache_dtype)


def _check_ranks(size: ModelSize, model: str, ranks: int) -> None:
    if ranks % 2:
        raise ValueError(
            f"--gpus is {ranks}; a layout splits the GPUs into equal groups of 1, 2, 4 or 8, and "
            f"{ranks} GPUs leave only groups of 1, nothing to switch between; name an even number"
        )
    if size.divides(ranks):
        return
    allowed = [tp for tp in range(2, NODE_SIZE + 1, 2) if size.divides(tp)]
    way_out = "an engine on one GPU is all that it can have"
    if allowed:
        way_out = (
            f"name --gpus {' or '.join(map(str, allowed))}, for one of several engines, and its "
            "share of the responses (--responses)"
        )
    raise ValueError(
        f"--gpus is {ranks}, but vLLM cannot split {model} over {ranks} ranks, with its "
        f"{size.heads} attention heads, {size.kv_heads} KV heads and MLPs of {size.intermediate}; "
        f"{way_out}"
    )


def _static_engines(
    machine: Machine, shape: EngineShape, layouts: Sequence[Layout]
) -> tuple[StaticEngines, ...]:
    """Those whose replicas have room for the longest request."""
    engines = []
    for layout in layouts:
        memory = estimate(machine.model, static_engine(shape, layout), machine.gpu.device)
        if (room := memory.kv_tokens[layout.tp]) > shape.max_model_len:
            most = shape.limits(layout).max_num_seqs
            engines.append(StaticEngines(layout, machine.step, most, room))
    return tuple(engines)


def load_of(batch: Batch, acceptance: float) -> Load:
    """The load that an engine is told to expect: one of the batches."""
    prompt = round(float(np.mean(batch.num_prompt_tokens)))
    return Load(len(batch.lengths), batch.lengths.tolist(), prompt, acceptance)
