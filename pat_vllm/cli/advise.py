"""`pat-vllm advise`: whether PAT would pay for given rollouts, before an engine is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pat_vllm.cli.options import options_of
from pat_vllm.cli.ranges import Ranged
from pat_vllm.modelled.gpus import NODE_SIZE
from pat_vllm.models.known_models import MODEL_SHAPES

if TYPE_CHECKING:  # these are slow to import, for `--help`
    from pat_vllm.advice.advice import Advice
    from pat_vllm.advice.replayed_drafts import DraftsGive
    from pat_vllm.models.checkpoint import WithDefaults

_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class AdviseOptions(Ranged):
    """Rollouts and an engine."""

    model: Annotated[
        str | None,
        typer.Option(
            help=f"Checkpoint's directory or config.json; or one of {', '.join(MODEL_SHAPES)}."
        ),
    ] = None
    gpu: Annotated[str | None, typer.Option(help="Modelled GPU: A40, H100, H200.")] = None
    gpus: Annotated[
        int,
        typer.Option(
            min=2,
            max=NODE_SIZE,
            help="GPUs of the engine, on one node; with --gpu. For several nodes, ask about one "
            "and its share of the responses.",
        ),
    ] = 8
    profile: Annotated[
        Path | None, typer.Option(help="An engine's profile, in place of --gpu and --gpus.")
    ] = None
    responses: Annotated[
        int,
        typer.Option(
            min=2, max=1_000_000, help="Of an iteration, on these GPUs: prompts x samples."
        ),
    ] = 1024
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Earlier rollouts, from which lengths are drawn: a JSON array of lengths, one per "
            "line, or JSON lines of a trainer's dump."
        ),
    ] = None
    shape: Annotated[
        str,
        typer.Option(
            help="Without --lengths: deepscaler, log-normal, two-mode, alike, uniform, straggler, "
            "grpo, rl-traces."
        ),
    ] = "deepscaler"
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_TOKENS,
            help="Longest response; without it the longest in --lengths, or 16384, or what the "
            "engine of --profile allows.",
        ),
    ] = None
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of first draft tokens accepted; 0: no drafts. Without it, as texts in "
            "--lengths are replayed, else 0.",
        ),
    ] = None
    drafting: Annotated[
        float, typer.Option(min=0, max=60, help="Seconds a drafter adds to a step; with --gpu.")
    ] = 0.0
    drafter: Annotated[
        str | None,
        typer.Option(
            help="With weights, in place of n-grams: mtp, or an EAGLE head's or a draft model's "
            "directory; with --gpu and --acceptance."
        ),
    ] = None
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=65536, help="Of a GPU, as in vLLM; with --gpu.")
    ] = 256
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Of a plain checkpoint's weights, as in vLLM: fp8, fp8_per_tensor, "
            "fp8_per_channel, fp8_per_block; with --gpu. Another has its own."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="As in vLLM: auto, fp8, fp8_e4m3, fp8_e5m2; with --gpu."),
    ] = "auto"
    seed: Annotated[int, typer.Option(min=0, max=1 << 62, help="Of what is drawn.")] = 0

    def refuse_beside(self, option: str, others: Iterable[str]) -> None:
        """Refuse options that mean nothing beside another one.

        Raises:
            ValueError: one of `others` is not its default.
        """
        defaults = {field.name: field.default for field in fields(self)}
        for other in others:
            if getattr(self, other) != defaults[other]:
                name = other.replace("_", "-")
                raise ValueError(f"--{name} and --{option} exclude each other; leave one out")


def advice_for(
    options: AdviseOptions, with_defaults: WithDefaults = lambda config: None
) -> tuple[Advice, DraftsGive | None]:
    """The advice, and what drafts would have given to earlier rollouts whose texts are known.

    Raises:
        ValueError: an option or a file is wrong, or cannot be read.
    """
    from pat_vllm.advice.advice import advise
    from pat_vllm.advice.batches import earlier_rollouts, replayed_drafts, sampled_batches
    from pat_vllm.advice.engines import DRAFT_LENGTHS, modelled_engines, profiled_engines
    from pat_vllm.models.checkpoint import named_config
    from pat_vllm.profile import Profile

    if options.drafter is not None:
        options.refuse_beside("drafter", ("drafting",))
        if not options.acceptance:
            raise ValueError(
                f"--drafter is {options.drafter}: name the share of its first draft tokens that is "
                "accepted by --acceptance, as vLLM's metrics say it"
            )
    earlier = earlier_rollouts(options)
    give, acceptance = None, options.acceptance
    if acceptance is None:
        give = replayed_drafts(earlier, max(DRAFT_LENGTHS))
        acceptance = give.acceptance if give is not None else 0.0
    if options.profile is None:
        if options.gpu is None or options.model is None:
            missing = "--gpu" if options.gpu is None else "--model"
            raise ValueError(
                f"{missing} is missing; name a modelled GPU (--gpu H100) and a model (--model "
                "DIRECTORY), or an engine's profile (--profile FILE, by `pat-vllm profile`)"
            )
        batches, longest = sampled_batches(options, earlier, acceptance)
        model = named_config(options.model, with_defaults)
        engines = modelled_engines(options, model, batches[0], acceptance, longest)
        return advise(engines, batches), give
    of_engine = ("gpu", "gpus", "drafting", "drafter", "max_num_seqs", "quantization")
    options.refuse_beside("profile", (*of_engine, "kv_cache_dtype"))
    profile = Profile.load(options.profile)
    if acceptance and not any(step.k for step in profile.steps):
        if give is None:
            raise ValueError(
                f"--acceptance is {acceptance:g}, but --profile {options.profile} has no steps "
                "with drafts; take it from an engine with speculative_config, or leave "
                "--acceptance out"
            )
        acceptance = 0.0
    limit = profile.key.get("max_model_len")
    batches, _ = sampled_batches(
        options, earlier, acceptance, limit if isinstance(limit, int) else None
    )
    return advise(profiled_engines(profile, drafts=acceptance > 0), batches), give


@options_of(AdviseOptions)
def advise_user(
    options: AdviseOptions,
    output: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Say whether PAT would pay for your rollouts, and with which settings. Computed, not run."""
    from pat_vllm.cli.with_defaults import with_defaults
    from pat_vllm.files.writing import to_json, write_whole

    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output is {output}; {output.parent} is no directory, make it first")
    if output is not None and output.is_dir():
        raise ValueError(f"--output is {output}, a directory; name a file in it")
    console = Console(highlight=False)
    with console.status("planning batches"):
        advice, give = advice_for(options, with_defaults)
    pasted = _settings(advice, options)
    _show(console, advice, options, give, pasted)
    if output is not None:
        write_whole(output, to_json({**advice.to_json(), "settings": pasted}))
        console.print(f"Written: {output}", markup=False, emoji=False)


def _settings(advice: Advice, options: AdviseOptions) -> dict[str, str]:
    from pat_vllm.advice.settings import CHECKPOINT, settings
    from pat_vllm.models.checkpoint import config_file

    file = config_file(options.model) if options.model is not None else None
    model = CHECKPOINT
    if file is not None and file.name == "config.json":
        model = str(file.parent.resolve())
    # An engine refuses a profile that was not measured on it.
    measured = None
    if options.profile is not None and not advice.engines.modelled:
        measured = str(options.profile.resolve())
    return settings(advice, model, None if options.profile else options.max_num_seqs, measured)


def _show(
    console: Console,
    advice: Advice,
    options: AdviseOptions,
    give: DraftsGive | None,
    pasted: Mapping[str, str],
) -> None:
    from pat_vllm.advice.settings import PLACEHOLDERS

    say = partial(console.print, markup=False, emoji=False)
    times = "MODELLED, not measured" if advice.engines.modelled else "measured"
    title = f"{advice.engines.title}: seconds of {options.responses:,} responses, planned; steps "
    table = Table(title=escape(f"{title}and switches {times}"), title_justify="left")
    table.add_column("layout")
    kinds = list(dict.fromkeys(static.drafts for static in advice.static))
    for kind in kinds:
        table.add_column(kind, justify="right")
    for layout in dict.fromkeys(static.layout for static in advice.static):
        cells = {
            static.drafts: f"{sum(seconds) / len(seconds):.1f}" + "*" * (static == advice.best)
            for static, seconds in advice.static.items()
            if static.layout == layout
        }
        table.add_row(f"static {layout} (tp={layout.tp})", *(cells[kind] for kind in kinds))
    pat = f"{sum(advice.pat) / len(advice.pat):.1f}"
    table.add_row("PAT", *[""] * (len(kinds) - 1), pat)
    console.print(table)
    if give is not None:
        say(
            f"Drafts, replayed from {give.responses:,} responses of the last iteration (k = "
            f"{give.k}): {give.own:.2f} tokens a step from a request's own text, "
            f"{give.earlier:.2f} with earlier responses to its prompt, which {give.repeated:.0%} "
            f"have; an acceptance of {give.acceptance:.2f}."
        )
    say(_verdict(advice), style="bold")
    say(f"PAT, in the first of {len(advice.pat)} sampled batches, {advice.path}.")
    if advice.engines.warning is not None:
        say(f"An engine with these options warns: {advice.engines.warning}.")
    say("Settings:" if advice.pays else "Settings of the best static layout, without PAT:")
    for name, text in pasted.items():
        console.print(f"[bold]# {name}[/bold]")
        say(text, soft_wrap=True)
    for placeholder, meaning in PLACEHOLDERS.items():
        if any(placeholder in text for text in pasted.values()):
            say(f"Replace {placeholder} by {meaning}.", soft_wrap=True)
    if advice.engines.modelled:
        say(
            "Modelled from public figures of the GPU; absolute times may be off by tens of percent."
        )


def _verdict(advice: Advice) -> str:
    gain = advice.gain
    best = f"Best static layout (*): {advice.best}."
    saved = f"PAT saves {gain.mean:.1%} (95% interval {gain.low:.1%} to {gain.high:.1%})"
    if advice.pays:
        return f"{best} {saved}."
    return f"{best} Nothing to gain: {saved}. Take the static layout."
