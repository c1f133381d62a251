"""Batches of response lengths, and files of them. Pure.

Lengths are in tokens. A length equal to the trace's `max_tokens` is a response that ran into it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from pat_vllm.files.reading import (
    FileError,
    cut,
    first_problem,
    name_of,
    read_json,
    read_text,
    shown,
)

_SHORTEST_PROMPT, LONGEST_PROMPT = 64, 512
"""Of synthetic prompts, in tokens."""

_FILE_PROMPT = 256
"""Prompt tokens of a trace file that does not tell."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_GROUPED = re.compile(r"(?<![\d,])[1-9]\d{0,2}(,\d{3})+(?![\d,])")
"""A number with its thousands apart, or numbers."""
_HEADER = re.compile(r'"?(?!(null|none|nan|n/?a|inf|infinity|true|false)\b)[a-z_][^"]*"?', re.I)
"""A word of a line that names columns: neither a number nor what stands where one is missing."""
_PROMPTS = "num_prompt_tokens"

MOST_TOKENS = 1 << 24
"""Of a prompt or a response."""
MOST_SECONDS = 1e9
"""Until an arrival."""

_Tokens = Annotated[int, Strict(), Field(ge=1, le=MOST_TOKENS)]
_Group = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
_Before = Annotated[int, Strict(), Field(ge=-1)]
_Seconds = Annotated[float, Strict(), Field(ge=0, le=MOST_SECONDS)]


class TurnLengths(NamedTuple):
    """A turn of a trajectory.

    Attributes:
        response: tokens of its response.
        appended: tokens of what a tool or a user says to that; of the last turn they do not matter.
        tool_seconds: from the end of the response to the next turn's arrival.
    """

    response: float
    appended: float = 0
    tool_seconds: float = 0.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LengthTrace:
    """Requests and the lengths of their responses.

    A request may be the next turn of an earlier one: it arrives some time after that one ended, and
    its prompt is all that one held and tokens of its own.

    Attributes:
        name: what the trace is called in tables and figures.
        lengths: tokens of each response, 1 to `max_tokens`.
        arrivals: when each request arrives, in seconds since the trace began, or, where it
            continues another, since that one ended; empty: all at once.
        groups: equal for requests with equal prompts; empty: no two are equal.
        num_prompt_tokens: of each request; empty: 256 each.
        max_tokens: tokens after which a response is cut short; of a trajectory all that follows its
            first prompt; 0: the longest.
        after: for each request the index of the one that it continues, an earlier one; -1: none;
            empty: no request continues another.
        acceptance: probability that a draft token is accepted if those before it were, in the mean
            over requests; every step of a request has drafts.

    Raises:
        ValueError: a value is out of range, or the tuples differ in size.
    """

    name: str
    lengths: Annotated[tuple[_Tokens, ...], Field(min_length=1)]
    arrivals: tuple[_Seconds, ...] = ()
    groups: tuple[_Group, ...] = ()
    num_prompt_tokens: tuple[_Tokens, ...] = ()
    max_tokens: Annotated[int, Strict(), Field(ge=0, le=MOST_TOKENS)] = 0
    acceptance: Annotated[float, Strict(), Field(ge=0, le=1)] = 0.0
    after: tuple[_Before, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        count = len(self.lengths)
        defaults: dict[str, Any] = {
            "arrivals": (0.0,) * count,
            "groups": tuple(range(count)),
            "num_prompt_tokens": (_FILE_PROMPT,) * count,
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)  # of a frozen value that is being made
        for name in (*defaults, "after"):
            if len(getattr(self, name)) not in (0, count):
                raise ValueError(f"{count} lengths but {len(getattr(self, name))} {name}")
        self._check_turns()
        longest = max(self.followed)
        if not self.max_tokens:
            object.__setattr__(self, "max_tokens", longest)
        if longest > self.max_tokens:
            what = "trajectory" if self.has_turns else "length"
            raise ValueError(f"a {what} is {longest:,}; max_tokens={self.max_tokens}")
        return self

    def _check_turns(self) -> None:
        continued: set[int] = set()
        for request, before in enumerate(self.after):
            if before < 0:
                continue
            if before >= request or before in continued:
                raise ValueError(
                    f"request {request} continues {before}, which is no earlier one, or which "
                    "another continues"
                )
            continued.add(before)
            held = self.num_prompt_tokens[before] + self.lengths[before]
            if self.num_prompt_tokens[request] < held:
                raise ValueError(
                    f"request {request} has a prompt of {self.num_prompt_tokens[request]:,} tokens "
                    f"and continues one that held {held:,}"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def has_turns(self) -> bool:
        """Whether a request continues another."""
        return any(before >= 0 for before in self.after)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """For each request the first one of its trajectory, which may be itself."""
        first = list(range(len(self)))
        for request, before in enumerate(self.after):
            if before >= 0:
                first[request] = first[before]
        return tuple(first)

    @cached_property
    def followed(self) -> tuple[int, ...]:
        """For each request the tokens of its trajectory that follow the first prompt, up to the end
        of its response."""
        prompts = self.num_prompt_tokens
        return tuple(
            prompts[request] - prompts[first] + self.lengths[request]
            for request, first in enumerate(self.first)
        )

    @property
    def trajectories(self) -> dict[int, int]:
        """The last request of each trajectory, by its first one."""
        return dict(zip(self.first, range(len(self)), strict=True))

    @property
    def longest(self) -> int:
        """Tokens that a trajectory may hold in the end, or a request with its response."""
        return max(self.num_prompt_tokens[first] for first in self.first) + self.max_tokens

    def with_prompts(self, most: int) -> LengthTrace:
        """The same, with first prompts of at most so many tokens."""
        prompts = self.num_prompt_tokens
        shorter = [max(0, prompts[first] - most) for first in self.first]
        cut = tuple(tokens - less for tokens, less in zip(prompts, shorter, strict=True))
        return replace(self, num_prompt_tokens=cut)

    @classmethod
    def batch(
        cls,
        name: str,
        lengths: Iterable[float],
        max_tokens: int,
        seed: int,
        groups: Sequence[int] | None = None,
    ) -> LengthTrace:
        """A batch: `lengths` are rounded and bounded, prompts drawn, one per group."""
        cut = tuple(min(max_tokens, max(1, round(length))) for length in lengths)
        groups = range(len(cut)) if groups is None else groups
        tokens = _prompts(max(groups, default=0) + 1, seed)
        prompts = tuple(tokens[group] for group in groups)
        return cls(name, cut, (), tuple(groups), prompts, max_tokens)

    @classmethod
    def of_trajectories(
        cls,
        name: str,
        trajectories: Sequence[Sequence[TurnLengths]],
        max_tokens: int,
        seed: int,
        num_prompt_tokens: Sequence[int] = (),
    ) -> LengthTrace:
        """A batch of trajectories, one after another, whose first turns arrive at once.

        Tokens are rounded. A trajectory ends where it has `max_tokens` behind its first prompt.

        Args:
            num_prompt_tokens: of each first prompt; empty: drawn.
        """
        prompts = num_prompt_tokens or _prompts(len(trajectories), seed)
        columns: list[tuple[int, float, int, int]] = []
        for first, turns in zip(prompts, trajectories, strict=True):
            held, arrives, before = first, 0.0, -1
            for response, appended, tool_seconds in turns:
                if (room := first + max_tokens - held) < 1:
                    break
                length = min(room, max(1, round(response)))
                columns.append((length, arrives, held, before))
                held += length + round(appended)
                arrives, before = tool_seconds, len(columns) - 1
        lengths, arrivals, held_tokens, after = zip(*columns, strict=True)
        return cls(name, lengths, arrivals, (), held_tokens, max_tokens, after=after)


def _prompts(count: int, seed: int) -> list[int]:
    # A stream of its own, so that prompts do not change with how lengths are drawn.
    random = np.random.default_rng((seed, 1))
    drawn = random.integers(_SHORTEST_PROMPT, LONGEST_PROMPT, size=count, endpoint=True)
    return drawn.tolist()  # type: ignore[no-any-return]


def load_trace(path: Path) -> LengthTrace:
    """A trace from a file.

    A `.json` file holds an object with `lengths` and, where wanted, the other fields of
    `LengthTrace`; any other file is read by `lengths_in`.
    Default: a batch of unrelated prompts of 256 tokens, bounded by the longest response.

    Raises:
        ValueError: the file cannot be read, or its content is not a trace; says what is wrong, and
            where.
    """
    try:
        if path.suffix.lower() == ".json":
            data = read_json(path)
        else:
            data = {"lengths": lengths_in(read_text(path))}
        if not isinstance(data, dict) or "lengths" not in data:
            raise ValueError('expected a JSON object like {"lengths": [120, 4000]}')
        name = cut(str(data.get("name", path.stem)), 80)
        data |= {field: _whole(data[field]) for field in ("lengths", _PROMPTS) if field in data}
        return TypeAdapter(LengthTrace).validate_python({**data, "name": name})
    except ValidationError as error:
        problem = first_problem(error)
        if isinstance(value := error.errors()[0]["input"], str | float | int | None):
            problem += f", got {shown(value)}"
    except ValueError as error:
        problem = str(error)
    raise FileError(f"{name_of(path)} is not a length trace: {problem}")


def _whole(values: Any) -> Any:
    """The same, with whole numbers where numbers are whole."""
    if not isinstance(values, list):
        return values
    return [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]


def lengths_in(text: str) -> list[int]:
    """Lengths in a text that is no JSON: a number a line, after an optional line of words, with `#`
    comments; or all of them on one line.

    Raises:
        ValueError: says which line is something else, and what is there.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    filled = [(number, line) for number, line in enumerate(lines, 1) if line]
    words = [(number, re.findall(r"[^\s,;]+", line)) for number, line in filled]
    if words and all(_HEADER.fullmatch(word) for word in words[0][1]):
        number, header = words.pop(0)
        if len(header) > 1 and re.search("[,;\t]", lines[number - 1]):
            raise ValueError(
                f"line {number} has columns, {shown(lines[number - 1])}; keep that of lengths alone"
            )
    if not words:
        raise ValueError("it has no lengths")
    lengths: list[int] = []
    for number, of_line in words:
        if _GROUPED.search(lines[number - 1]):
            raise ValueError(
                f"line {number} has a comma within a number or between two, "
                f"{shown(lines[number - 1])}: write 1024 for 1,024, and a space behind other commas"
            )
        if len(of_line) != 1 and len(words) > 1:
            raise ValueError(
                f"line {number} must be one length in tokens, got {shown(lines[number - 1])}; only "
                "a line that has all of them may have several"
            )
        for word in of_line:
            value = float(word) if _NUMBER.fullmatch(word := word.strip('"')) else math.nan
            if not 1 <= value <= MOST_TOKENS or value % 1:
                raise ValueError(
                    f"line {number} must be one length in tokens, got {shown(word)}; allowed are "
                    f"whole numbers from 1 to {MOST_TOKENS:,}"
                )
            lengths.append(int(value))
    return lengths
