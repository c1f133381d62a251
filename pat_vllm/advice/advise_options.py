"""What `pat-vllm advise` is asked: its options, with their ranges and help, once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.cli.ranges import Ranged
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.start.gpus import NODE_SIZE

_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class AdviseOptions(Ranged):
    """Rollouts and an engine; the command line reads its options from these fields.

    Raises:
        ValueError: a number is out of its range.
    """

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
            min=2,
            max=1_000_000,
            help="Of an iteration, on these GPUs: prompts x samples; of agents, trajectories.",
        ),
    ] = 1024
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Earlier rollouts, from which lengths are drawn: a JSON array of lengths, one per "
            "line, JSON lines of a trainer's dump, or of trajectories with their turns."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests to replay as they are, arrivals included, in place of --responses and "
            "--lengths: a JSON object with lengths, arrivals, num_prompt_tokens, after."
        ),
    ] = None
    shape: Annotated[
        str,
        typer.Option(
            help="Without --lengths: deepscaler, log-normal, two-mode, alike, uniform, straggler, "
            "grpo, agents."
        ),
    ] = "deepscaler"
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_TOKENS,
            help="Longest response, or all turns of a trajectory with what tools append; without "
            "it the longest in --lengths, or 16384, or what the engine of --profile allows.",
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
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=65536, help="Of a GPU, as in vLLM; with --gpu.")
    ] = 256
    iterations: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=10_000,
            help="Iterations to replay, each drawn anew; 8 by default, 6 with drafts.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=1 << 62, help="Of what is drawn.")] = 0
    all_layouts: Annotated[
        bool,
        typer.Option(
            "--all", help="Replay every static layout in all iterations, and show each of them."
        ),
    ] = False

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
