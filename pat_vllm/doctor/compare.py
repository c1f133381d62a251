"""Whether an engine's tokens and log-probabilities are stock vLLM's. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LEAST_TOLERANCE = 2e-4
"""vLLM's CPU kernels round by the size of the batch: 1.03e-4 has been seen in float32."""
NOISE_FACTOR = 4.0
"""How far PAT may be off, relative to how far stock vLLM is off itself."""
MOST_NOISE = 0.5
"""Of stock vLLM, beyond which nothing can be compared with it."""


@dataclass(frozen=True)
class Output:
    """What an engine generated for a request.

    Attributes:
        tokens: ids.
        logprobs: of each, natural logarithms.
        likeliest: log-probabilities of the likeliest tokens at each position, by id; only of stock
            vLLM's.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True)
class Reference:
    """What stock vLLM says to a set of requests.

    Attributes:
        outputs: by request, greedy.
        forced: log-probabilities of the same tokens, by request, computed as a prompt's.
    """

    outputs: tuple[Output, ...]
    forced: tuple[tuple[float, ...], ...]

    @property
    def noise(self) -> float:
        """How far it is off itself: the same tokens, as generated and as a prompt."""
        return max(
            (
                _distance(a, b)
                for output, forced in zip(self.outputs, self.forced, strict=True)
                for a, b in zip(output.logprobs, forced, strict=True)
            ),
            default=0.0,
        )

    @property
    def tolerance(self) -> float:
        """How far an engine's log-probabilities may be off."""
        return max(LEAST_TOLERANCE, NOISE_FACTOR * self.noise)

    @property
    def problem(self) -> str | None:
        """Why nothing can be compared with it, or None."""
        if not self.noise <= MOST_NOISE:
            return (
                "stock vLLM does not agree with itself: the log-probabilities of the same tokens, "
                f"as generated and as a prompt, are {self.noise:.3g} apart (at most {MOST_NOISE})"
            )
        return None


@dataclass(frozen=True)
class Agreement:
    """How an engine's values compare with stock vLLM's.

    Attributes:
        compared: tokens whose log-probabilities were compared.
        ties: requests that went on with another token, as likely as stock vLLM's; what follows in
            them is not compared.
        worst: largest difference of log-probabilities.
        problem: the first difference that should not be, or None.
    """

    compared: int
    ties: int
    worst: float
    problem: str | None = None

    def __str__(self) -> str:
        ties = f", {self.ties} ties" if self.ties else ""
        return f"{self.compared} tokens, log-probabilities within {self.worst:.1e}{ties}"


def together(agreements: Iterable[Agreement]) -> Agreement:
    """Several as one: the first problem, the worst difference."""
    found = list(agreements)
    return Agreement(
        sum(one.compared for one in found),
        sum(one.ties for one in found),
        max((one.worst for one in found), default=0.0),
        next((one.problem for one in found if one.problem is not None), None),
    )


def compare_outputs(
    expected: Sequence[Output], got: Sequence[Output], tolerance: float
) -> Agreement:
    """Compare what was generated for the same requests.

    Args:
        expected: stock vLLM's, with `likeliest`.
        tolerance: of log-probabilities. Another token is the same where stock vLLM's are apart by
            at most twice this.
    """
    compared = ties = 0
    worst = 0.0
    for request, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for at, token in enumerate(theirs.tokens):
            where = f"request {request}, token {at}"
            if at >= len(ours.tokens):
                problem = f"request {request} has {at} tokens instead of {len(theirs.tokens)}"
                return Agreement(compared, ties, worst, problem)
            if (other := ours.tokens[at]) != token:
                best = theirs.logprobs[at]
                its = theirs.likeliest[at].get(other)
                if its is not None and best - its <= 2 * tolerance:
                    ties += 1
                    break
                odds = "is not among its likeliest" if its is None else f"has {its:.4f} there"
                problem = (
                    f"wrong token: {where} is {other}, in stock vLLM {token} with log-probability "
                    f"{best:.4f}; {other} {odds}"
                )
                return Agreement(compared, ties, worst, problem)
            apart = _distance(ours.logprobs[at], theirs.logprobs[at])
            compared += 1
            worst = max(worst, apart)
            if not apart <= tolerance:
                return Agreement(
                    compared,
                    ties,
                    worst,
                    _wrong(where, ours.logprobs[at], theirs.logprobs[at], tolerance),
                )
    return Agreement(compared, ties, worst)


def compare_forced(
    expected: Sequence[Sequence[float]], got: Sequence[Sequence[float]], tolerance: float
) -> Agreement:
    """Compare log-probabilities of given tokens, by request."""
    compared, worst = 0, 0.0
    for request, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            compared += 1
            worst = max(worst, _distance(a, b))
            if not _distance(a, b) <= tolerance:
                where = f"request {request}, token {at} (as a prompt's)"
                return Agreement(compared, 0, worst, _wrong(where, a, b, tolerance))
    return Agreement(compared, 0, worst)


def _wrong(where: str, ours: float, theirs: float, tolerance: float) -> str:
    return (
        f"wrong log-probability: {where} has {ours:.6f}, in stock vLLM {theirs:.6f}; "
        f"{tolerance:.1e} apart is allowed"
    )


def _distance(a: float, b: float) -> float:
    """Infinite where one of them is no number."""
    apart = abs(a - b)
    return apart if apart == apart else float("inf")
