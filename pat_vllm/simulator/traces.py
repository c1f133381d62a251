"""Batches of response lengths: synthetic ones, and files. Pure.

Lengths are in tokens. A length equal to the trace's `max_tokens` is a response that ran into it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Self

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
from pat_vllm.files.writing import write_whole
from pat_vllm.predictor.state import Floats, Ints

_SHORTEST_PROMPT, LONGEST_PROMPT = 64, 512
"""Of synthetic prompts, in tokens."""

_FILE_PROMPT = 256
"""Prompt tokens of a trace file that does not tell."""

MOST_TOKENS = 1 << 24
"""Of a prompt or a response."""
_LAST_ARRIVAL = 1e9

_DEEPSCALER_MEDIAN = 1443.0
_DEEPSCALER_SIGMA = 1.406


_Tokens = Annotated[int, Strict(), Field(ge=1, le=MOST_TOKENS)]
_Group = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
_Seconds = Annotated[float, Strict(), Field(ge=0, le=_LAST_ARRIVAL)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LengthTrace:
    """Requests and the lengths of their responses.

    Attributes:
        name: what the trace is called in tables and figures.
        lengths: tokens of each response, 1 to `max_tokens`.
        arrivals: when each request arrives, in seconds; empty: all at once.
        groups: equal for requests with equal prompts; empty: no two are equal.
        num_prompt_tokens: of each request; empty: 256 each.
        max_tokens: tokens after which a response is cut short; 0: the longest of `lengths`.
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

    @model_validator(mode="after")
    def _complete(self) -> Self:
        count, longest = len(self.lengths), max(self.lengths)
        defaults: dict[str, Any] = {
            "arrivals": (0.0,) * count,
            "groups": tuple(range(count)),
            "num_prompt_tokens": (_FILE_PROMPT,) * count,
            "max_tokens": longest,
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)  # of a frozen value that is being made
        for name in ("arrivals", "groups", "num_prompt_tokens"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{count} lengths but {len(getattr(self, name))} {name}")
        if longest > self.max_tokens:
            raise ValueError(f"a length is {longest:,}; max_tokens={self.max_tokens}")
        return self

    def __len__(self) -> int:
        return len(self.lengths)

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
        # A stream of its own, so that prompts do not change with how lengths are drawn.
        random = np.random.default_rng((seed, 1))
        tokens = random.integers(
            _SHORTEST_PROMPT, LONGEST_PROMPT, size=max(groups, default=0) + 1, endpoint=True
        )
        prompts = tuple(int(tokens[group]) for group in groups)
        return cls(name, cut, (), tuple(groups), prompts, max_tokens)

    def save(self, path: Path) -> None:
        """Write as JSON, for `load_trace`."""
        write_whole(Path(path), json.dumps(asdict(self)) + "\n")


def lognormal(
    requests: int, median: float, sigma: float, max_tokens: int, seed: int = 0
) -> LengthTrace:
    """Log-normal lengths; `sigma` is the standard deviation of their logarithm."""
    random = np.random.default_rng(seed)
    drawn = median * np.exp(sigma * random.standard_normal(requests))
    return LengthTrace.batch("log-normal", drawn, max_tokens, seed)


def two_mode(
    requests: int,
    median: float = 1000,
    sigma: float = 0.6,
    long_share: float = 0.1,
    max_tokens: int = 16384,
    seed: int = 0,
) -> LengthTrace:
    """Like reasoning: log-normal ones, and a share that ends in the last third before `max_tokens`
    or runs into it (a tenth of that share)."""
    random = np.random.default_rng(seed)
    usual = median * np.exp(sigma * random.standard_normal(requests))
    late = max_tokens * random.uniform(2 / 3, 2 / 3 + 1 / 3 / 0.9, requests)
    drawn = np.where(random.random(requests) < long_share, late, usual)
    return LengthTrace.batch("two modes", drawn, max_tokens, seed)


def uniform(
    requests: int, low: int, high: int, max_tokens: int | None = None, seed: int = 0
) -> LengthTrace:
    """All lengths from `low` to `high` equally likely."""
    drawn = np.random.default_rng(seed).integers(low, high, requests, endpoint=True)
    return LengthTrace.batch("uniform", drawn, max_tokens or high, seed)


def straggler(
    requests: int, usual: int, longest: int, max_tokens: int | None = None, seed: int = 0
) -> LengthTrace:
    """All lengths within 5% of `usual` but one, at a random place, of `longest`."""
    random = np.random.default_rng(seed)
    drawn = usual * random.uniform(0.95, 1.05, requests)
    drawn[random.integers(requests)] = longest
    return LengthTrace.batch("straggler", drawn, max_tokens or max(usual, longest), seed)


def staggered(
    requests: int,
    median: float,
    sigma: float,
    max_tokens: int,
    interval: float,
    poisson: bool = True,
    seed: int = 0,
) -> LengthTrace:
    """Log-normal lengths; requests arrive `interval` seconds apart, on average or exactly."""
    batch = lognormal(requests, median, sigma, max_tokens, seed)
    random = np.random.default_rng((seed, 2))
    gaps = random.exponential(interval, requests) if poisson else np.full(requests, interval)
    arrivals: Floats = np.cumsum(gaps) - gaps[0]
    return replace(batch, name="staggered", arrivals=tuple(arrivals.tolist()))


def shifted(
    medians: Sequence[float], requests: int, sigma: float, max_tokens: int, seed: int = 0
) -> tuple[LengthTrace, ...]:
    """A log-normal batch for each of `medians`."""
    return tuple(
        replace(
            lognormal(requests, median, sigma, max_tokens, seed * 100_003 + number),
            name=f"median {median:g}",
        )
        for number, median in enumerate(medians)
    )


def grpo(
    prompts: int,
    samples: int,
    within_sigma: float,
    between_sigma: float,
    median: float = 1000,
    max_tokens: int = 16384,
    seed: int = 0,
) -> LengthTrace:
    """`samples` responses to each of `prompts` prompts, with correlated log-normal lengths.

    The intraclass correlation of log-lengths is between^2 / (between^2 + within^2).
    """
    random = np.random.default_rng(seed)
    groups: Ints = np.repeat(np.arange(prompts), samples)
    logs = between_sigma * random.standard_normal(prompts)[groups]
    logs += within_sigma * random.standard_normal(len(groups))
    return LengthTrace.batch("GRPO", median * np.exp(logs), max_tokens, seed, groups.tolist())


def deepscaler(requests: int = 128, max_tokens: int = 24576, seed: int = 0) -> LengthTrace:
    """Log-normal with median 1443 and sigma 1.406, after the shares PAT reports for DeepScaleR.

    These make 10.85% of responses longer than 8192 tokens and 2.19%, that is 2.8 of 128, reach
    24576: the unique log-normal distribution for which both are so.
    """
    batch = lognormal(requests, _DEEPSCALER_MEDIAN, _DEEPSCALER_SIGMA, max_tokens, seed)
    return replace(batch, name="DeepScaleR-like")


Generator = Callable[[int, int, int], LengthTrace]
GENERATORS: Mapping[str, Generator] = {
    "deepscaler": deepscaler,
    "log-normal": lambda requests, max_tokens, seed: lognormal(
        requests, max_tokens / 16, 1.2, max_tokens, seed
    ),
    "two-mode": lambda requests, max_tokens, seed: two_mode(
        requests, median=max_tokens / 16, max_tokens=max_tokens, seed=seed
    ),
    "alike": lambda requests, max_tokens, seed: replace(
        uniform(requests, max_tokens // 17 + 1, max_tokens // 16 + 1, max_tokens, seed),
        name="alike",
    ),
    "uniform": lambda requests, max_tokens, seed: uniform(requests, 1, max_tokens, seed=seed),
    "straggler": lambda requests, max_tokens, seed: straggler(
        requests, max(1, max_tokens // 16), max_tokens, seed=seed
    ),
    "grpo": lambda requests, max_tokens, seed: grpo(
        max(1, requests // 8), 8, 0.6, 1.0, median=max_tokens / 16, max_tokens=max_tokens, seed=seed
    ),
}
"""Synthetic workloads by name: made by (requests, longest response in tokens, seed)."""


def generator(workload: str) -> Generator:
    """The generator of a synthetic workload.

    Raises:
        ValueError: its name is unknown.
    """
    if workload not in GENERATORS:
        raise ValueError(f"workload {workload!r} is unknown; allowed are {', '.join(GENERATORS)}")
    return GENERATORS[workload]


def load_trace(path: Path) -> LengthTrace:
    """A trace from a file.

    A `.json` file holds an object with `lengths` and, where wanted, the other fields of
    `LengthTrace`; any other file one length per line, after an optional header, with `#` comments.
    Default: a batch of unrelated prompts of 256 tokens, bounded by the longest response.

    Raises:
        ValueError: the file cannot be read, or its content is not a trace; says what is wrong, and
            where.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".json":
            return _made(path.stem, read_json(path))
        return _made(path.stem, {"lengths": _lines(read_text(path))})
    except ValueError as error:
        raise FileError(f"{name_of(path)} is not a length trace: {error}") from error


def _made(stem: str, data: Any) -> LengthTrace:
    if not isinstance(data, dict) or "lengths" not in data:
        raise ValueError('expected a JSON object like {"lengths": [120, 4000]}')
    try:
        return _TRACE.validate_python({**data, "name": cut(str(data.get("name", stem)), 80)})
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


_TRACE = TypeAdapter(LengthTrace)


def _lines(text: str) -> list[int]:
    lengths: list[int] = []
    first = True
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip().rstrip(",;").strip('"')
        if not word:
            continue
        try:
            lengths.append(int(word))
        except ValueError:
            if not first:
                raise ValueError(
                    f"line {number} must be one length in tokens, got {shown(word)}"
                ) from None
        first = False
    return lengths
