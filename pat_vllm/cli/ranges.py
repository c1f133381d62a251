"""Options of several commands, and ranges of options, declared once, beside an option's help."""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

import typer

PATOptions = Annotated[
    dict[str, Any],
    typer.Option(
        metavar="JSON", help="PAT's options of the engine (base_tp, experts, ...), an object."
    ),
]
EngineOptions = Annotated[
    dict[str, Any], typer.Option(metavar="JSON", help="Further options of vLLM's LLM, an object.")
]


class Ranged:
    """A dataclass whose fields are a command's options, each annotated with `typer.Option`.

    Raises:
        ValueError: a number is out of the range of its option (`min` and `max`).
    """

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, (option,) = getattr(self, name), hint.__metadata__
            if option.min is None or value is None or option.min <= value <= option.max:
                continue
            from pat_vllm.files.reading import shown  # slow, for `--help`

            raise ValueError(
                f"--{name.replace('_', '-')} is {shown(value)}; allowed is {option.min:,} to "
                f"{option.max:,}"
            )
