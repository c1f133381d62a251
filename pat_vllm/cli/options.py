"""Values of options, checked."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_origin

import typer

_NO_OPTIONS = "{}"


def options_of(model: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command whose options are the fields of a dataclass.

    Args:
        model: the dataclass, whose fields are annotated with `typer.Option`; one that is a dict is
            given as a JSON object. The decorated function takes a value of it first, and its other
            parameters are further options. A `ValueError`, also of the function, ends the command
            as a wrong option does, an `ImportError` or `OSError` as `failed`. Ranges are checked by
            the dataclass (`Ranged`): it names the value and both ends.
    """
    fields = inspect.signature(model, eval_str=True).parameters
    of_model = {name: _for_typer(field) for name, field in fields.items()}
    objects = [name for name, field in of_model.items() if field.default == _NO_OPTIONS]

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        _, *further = inspect.signature(run, eval_str=True).parameters.values()

        @functools.wraps(run)
        def command(**given: Any) -> None:
            try:
                given |= {
                    name: json_object(f"--{name.replace('_', '-')}", given[name])
                    for name in objects
                }
                run(model(**{name: given.pop(name) for name in of_model}), **given)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            except ImportError as error:
                if error.name is None:  # ours, which says what is needed
                    raise failed(error) from error
                needs = "this command needs vLLM: pip install 'pat-vllm[cpu]' or 'pat-vllm[cuda]'"
                raise failed(f"{error}; {needs}") from error
            except OSError as error:
                raise failed(error) from error

        # What Typer reads.
        options = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in (*of_model.values(), *further)
        ]
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return command

    return decorate


def check_engine(engine: Mapping[str, Any], pat: Mapping[str, Any], ranks: int) -> None:
    """Check `--engine`, and that PAT's options, which are an option of their own, fit the ranks.

    Raises:
        ValueError: says what is wrong.
    """
    from pat_vllm.config import PATConfig  # slow, for `--help`

    PATConfig.parse(pat).resolve_layouts(ranks)
    additional = engine.get("additional_config", {})
    if not isinstance(additional, Mapping):
        raise ValueError("--engine: additional_config is not an object")
    if "pat" in additional:
        raise ValueError("--engine has PAT's options in additional_config: give them by --pat")


def _for_typer(field: inspect.Parameter) -> inspect.Parameter:
    """An option that says its range in its help only; an object is given as text."""
    hint, option = field.annotation.__origin__, copy.copy(field.annotation.__metadata__[0])
    if option.min is not None:
        option.help = f"{option.help} From {option.min:,} to {option.max:,}."
        option.min = option.max = None
    if get_origin(hint) is dict:
        return field.replace(annotation=Annotated[str, option], default=_NO_OPTIONS)
    return field.replace(annotation=Annotated[hint, option])


def failed(problem: object) -> typer.Exit:
    """The end of a command that could not do its work; says why."""
    typer.echo(str(problem), err=True)
    return typer.Exit(1)


def json_object(option: str, text: str) -> dict[str, Any]:
    """Options that are given on a command line.

    Raises:
        ValueError: it is no JSON object.
    """
    from pat_vllm.files.reading import parse_json, shown  # slow, for `--help`

    try:
        options = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{option} takes a JSON object, not {shown(text)}: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{option} takes a JSON object, not {shown(options)}")
    return options
