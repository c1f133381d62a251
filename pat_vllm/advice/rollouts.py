"""What is to be replayed: an engine, and iterations' responses. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pat_vllm.advice.advise_options import AdviseOptions
from pat_vllm.advice.lengths import EarlierRollouts, Tokenize, read_rollouts
from pat_vllm.advice.replayed_drafts import DraftsGive, drafts_give
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import cut, read_text, shown
from pat_vllm.modelled.batch_time import Load
from pat_vllm.modelled.hardware import measured_noise, modelled_profile
from pat_vllm.models.checkpoint import NamedConfig, WithDefaults, config_file, named_config
from pat_vllm.models.model_size import ModelSize
from pat_vllm.profile import Profile
from pat_vllm.simulator.ground_truth import ReplayedGroundTruth
from pat_vllm.simulator.shapes import GENERATORS
from pat_vllm.simulator.traces import LONGEST_PROMPT, LengthTrace, load_trace
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.choice import choose
from pat_vllm.start.gpus import GPUS, NODE_SIZE, gpu_named

DRAFT_LENGTHS = (0, 1, 2, 4, 7)
"""Those that an engine with `num_speculative_tokens` 7 keeps ready."""

_CHAINS = 2
"""Rows of batches in which PAT learns anew; of two processes each takes one."""
_USUAL_MAX_TOKENS = 16384
_ITERATIONS, _ITERATIONS_WITH_DRAFTS = 8, 6
"""By default. Those with drafts take longer to replay."""


@dataclass(frozen=True)
class Rollouts:
    """What is asked about.

    Attributes:
        profile: of PAT's engine; modelled, or measured.
        static: of static engines: the same, or one with other layouts, PAT's among them, and
            memory.
        chains: iterations' responses, some in a row. PAT learns from the first of a row, which is
            not reported. Each has the acceptance of the drafts.
        all_layouts: whether every static layout is replayed in all batches.
        drafts: what drafts would have given to the earlier rollouts; None: nobody asked, or their
            texts are not known.
        text_only: the model has more than text, of which PAT serves the text alone.
    """

    profile: Profile
    static: Profile
    chains: tuple[tuple[LengthTrace, ...], ...]
    all_layouts: bool = False
    drafts: DraftsGive | None = None
    text_only: bool = False

    @cached_property
    def batches(self) -> tuple[LengthTrace, ...]:
        """Those that are reported, row by row."""
        return tuple(batch for chain in self.chains for batch in chain[1:])

    @cached_property
    def draft_lengths(self) -> tuple[int, ...]:
        """Among which configurations choose; 0 alone where no drafts are accepted."""
        if not self.batches[0].acceptance:
            return (0,)
        return tuple(sorted({0} | {s.k for s in self.profile.steps if s.k in DRAFT_LENGTHS}))

    @cached_property
    def truth(self) -> ReplayedGroundTruth:
        """What steps and switches take."""
        measured = self.profile.kind == "measured"
        steps = self.static.model_copy(update={"switches": self.profile.switches})
        return ReplayedGroundTruth(steps, self.profile if measured else measured_noise())

    @cached_property
    def with_own_limits(self) -> Profile:
        """The profile of static engines whose replicas all run what one of the base layout does."""
        base, sizes = self.static.layouts[0], [layout.tp for layout in self.static.layouts]
        limits = {
            name: dict.fromkeys(sizes, getattr(self.static, name)[base.tp])
            for name in ("max_num_seqs", "max_batch_tokens")
        }
        return self.static.model_copy(update=limits)


def rollouts_of(
    options: AdviseOptions, with_defaults: WithDefaults = lambda config: None
) -> Rollouts:
    """What is to be replayed.

    Args:
        with_defaults: for the checkpoint's config.

    Raises:
        ValueError: an option or a file is wrong, or cannot be read.
    """
    trace = None
    if options.trace is not None:
        options.refuse_beside(
            "trace", ("lengths", "shape", "responses", "max_tokens", "iterations", "seed")
        )
        trace = load_trace(options.trace)
        if options.acceptance is None:
            options = replace(options, acceptance=trace.acceptance)
    earlier = read_rollouts(options.lengths, _tokenizer(options)) if options.lengths else None
    drafts = None
    if options.acceptance is None and earlier and earlier.texts:
        drafts = drafts_give(earlier.texts, max(DRAFT_LENGTHS))
        options = replace(options, acceptance=drafts.acceptance)
    model = None
    if options.profile is None and options.model is not None:
        model = named_config(options.model, with_defaults)
    engine = engine_of(options, model)
    if options.acceptance and not any(step.k for step in engine.steps):
        if drafts is None:
            raise ValueError(
                f"--acceptance is {options.acceptance:g}, but --profile {options.profile} has no "
                "steps with drafts; take it from an engine with speculative_config, or leave "
                "--acceptance out"
            )
        options = replace(options, acceptance=0.0)
    limit = engine.key.get("max_model_len")
    limit = limit if isinstance(limit, int) else None
    if trace is None:
        chains = _drawn(options, earlier, limit)
    else:
        both = zip(trace.num_prompt_tokens, trace.lengths, strict=True)
        _check_room(max(map(sum, both)), limit)
        chains = ((replace(trace, acceptance=options.acceptance or 0.0),) * 2,)
    # As vLLM's max_model_len, which a replica's memory has to hold.
    longest = max(batch.longest for chain in chains for batch in chain)
    if engine.kind == "modelled":
        engine = with_room(engine, longest)
    if len(engine.layouts) < 2:
        raise ValueError(
            f"{engine.title} has no layout but tp={engine.layouts[0].tp} with memory for "
            f"{longest:,} tokens; name more GPUs of a node (--gpus 2 to {NODE_SIZE}), or shorter "
            "responses (--max-tokens)"
        )
    ours = engine if model is None else _chosen(options, model, engine, chains[0][0], longest)
    text_only = model is not None and model.text_only
    return Rollouts(ours, engine, chains, options.all_layouts, drafts, text_only)


def engine_of(options: AdviseOptions, model: NamedConfig | None) -> Profile:
    """The profile that is given, or a modelled one of static engines.

    Args:
        model: that of --model.

    Raises:
        ValueError: an option is wrong or missing.
    """
    if options.profile is not None:
        options.refuse_beside("profile", ("gpu", "gpus", "drafting", "max_num_seqs"))
        return Profile.load(options.profile)
    if options.gpu is None or model is None:
        missing = "--gpu" if options.gpu is None else "--model"
        raise ValueError(
            f"{missing} is missing; name a modelled GPU (--gpu H100) and a model (--model "
            "DIRECTORY), or an engine's profile (--profile FILE, by `pat-vllm profile`)"
        )
    if options.gpus % 2:
        raise ValueError(
            f"--gpus is {options.gpus}; a layout splits the GPUs into equal groups of 1, 2, 4 or "
            f"8, and {options.gpus} GPUs leave only groups of 1, nothing to switch between; name "
            "an even number"
        )
    shape = ModelSize.of(model.fields)
    if shape.divides(options.gpus):
        return modelled_engine(options, model, static=True)
    allowed = [tp for tp in range(2, NODE_SIZE + 1, 2) if shape.divides(tp)]
    way_out = "an engine on one GPU is all that it can have"
    if allowed:
        way_out = (
            f"name --gpus {' or '.join(map(str, allowed))}, for one of several engines, and its "
            "share of the responses (--responses)"
        )
    raise ValueError(
        f"--gpus is {options.gpus}, but vLLM cannot split {model.name} over {options.gpus} ranks, "
        f"with its {shape.heads} attention heads, {shape.kv_heads} KV heads and MLPs of "
        f"{shape.intermediate}; {way_out}"
    )


def modelled_engine(options: AdviseOptions, model: NamedConfig, **more: Any) -> Profile:
    """The engine of a model and --gpu; `more` as for `modelled_profile`."""
    assert options.gpu is not None
    return modelled_profile(
        model,
        options.gpu,
        options.gpus,
        draft_lengths=DRAFT_LENGTHS[1:] if options.acceptance else (),
        drafting=options.drafting,
        max_num_seqs=options.max_num_seqs,
        **more,
    )


def with_room(profile: Profile, tokens: int) -> Profile:
    """A profile without the layouts whose replicas cannot hold the KV of so many tokens; of the
    widest one at least."""
    *_, widest = profile.layouts
    room = {tp for tp, most in profile.kv_tokens.items() if most > tokens} | {widest.tp}
    left = [layout for layout in profile.layouts if layout.tp in room]
    return profile.model_copy(
        update={
            "layouts": tuple(left),
            "steps": tuple(s for s in profile.steps if s.layout in left),
            "switches": tuple(s for s in profile.switches if s.source in left and s.target in left),
        }
    )


def _chosen(
    options: AdviseOptions, model: NamedConfig, alone: Profile, first: LengthTrace, longest: int
) -> Profile:
    """PAT's engine, with the layouts that it would choose for such iterations."""
    assert options.gpu is not None
    shape = EngineShape(
        (),
        max_num_seqs=options.max_num_seqs,
        max_model_len=longest,
        num_speculative_tokens=max(DRAFT_LENGTHS) if options.acceptance else 0,
    )
    device = GPUS[gpu_named(options.gpu)].device
    choice = choose(model.fields, PATConfig(), shape, options.gpus, device, load=Load.of(first))
    sizes = [layout.tp for layout in choice.layouts]
    engine = modelled_engine(options, model, layouts=sizes, experts=choice.experts or "auto")
    engine = with_room(engine, longest)
    if engine.layouts != choice.layouts:
        raise ValueError(
            f"no layout of {alone.title} leaves memory for {longest:,} tokens to wider ones; "
            "name more GPUs of a node, or shorter responses (--max-tokens)"
        )
    return engine


# -------------------------------------------------------------------- responses


def _drawn(
    options: AdviseOptions, earlier: EarlierRollouts | None, max_model_len: int | None
) -> tuple[tuple[LengthTrace, ...], ...]:
    """Iterations drawn from earlier ones or a shape, in rows as `Rollouts.chains`;
    `max_model_len` is that of the profiled engine."""
    if earlier is None and options.shape not in GENERATORS:
        raise ValueError(f"--shape is {shown(options.shape)}; allowed are {', '.join(GENERATORS)}")
    usual = _ITERATIONS_WITH_DRAFTS if options.acceptance else _ITERATIONS
    count = (options.iterations or usual) + _CHAINS
    most, prompt = _longest(options, earlier, max_model_len)
    draw = earlier.draw if earlier is not None else GENERATORS[options.shape]
    drawn = [draw(options.responses, most, options.seed + i) for i in range(count)]
    batches = [
        replace(batch.with_prompts(prompt), acceptance=options.acceptance or 0.0) for batch in drawn
    ]
    return tuple(tuple(batches[i::_CHAINS]) for i in range(_CHAINS))


def _longest(
    options: AdviseOptions, earlier: EarlierRollouts | None, max_model_len: int | None
) -> tuple[int, int]:
    """Tokens of the longest response, or trajectory, and of the longest first prompt."""
    prompt = max(earlier.num_prompt_tokens, default=0) if earlier else 0
    most = options.max_tokens or (max(earlier.lengths) if earlier else _USUAL_MAX_TOKENS)
    if max_model_len is None:
        return most, prompt or LONGEST_PROMPT
    if not prompt:  # they are made up
        room = max_model_len - (options.max_tokens or 0)
        prompt = max(1, min(LONGEST_PROMPT, room if options.max_tokens else room // 4))
    if options.max_tokens is None:
        most = min(most, max_model_len - prompt)
    _check_room(prompt + max(1, most), max_model_len)
    return most, prompt


def _check_room(longest: int, max_model_len: int | None) -> None:
    if max_model_len is not None and longest > max_model_len:
        raise ValueError(
            f"a prompt and its response may have {longest:,} tokens, but the engine of --profile "
            f"was measured with max_model_len={max_model_len}; name shorter responses "
            "(--max-tokens), or profile an engine with a larger max_model_len"
        )


def _tokenizer(options: AdviseOptions) -> Tokenize | None:
    """The checkpoint's tokenizer; None where there is none."""
    config = config_file(options.model) if options.model else None
    file = config.with_name("tokenizer.json") if config else None
    if file is None or not file.is_file():
        return None

    def tokenize(texts: list[str]) -> list[list[int]]:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                f"--lengths {options.lengths} holds text, which takes the package `tokenizers`; "
                "`pip install tokenizers`, or give the lengths in tokens"
            ) from None
        try:
            tokenizer = Tokenizer.from_str(read_text(file, "tokenizer"))
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"tokenizer {file} cannot be read: {cut(str(error))}") from None
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    return tokenize
