"""Whether an engine's tokens and log-probabilities are stock vLLM's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pat_vllm.doctor.report import Unfit

LEAST_TOLERANCE = 2e-4
"""vLLM's CPU kernels round by the size of the batch: 1.03e-4 has been seen in float32."""
NOISE_FACTOR = 4.0
"""How far PAT may be off, relative to how far stock vLLM is off itself."""
MOST_NOISE = 0.5
"""Of stock vLLM, beyond which nothing can be compared with it."""


class Differs(Unfit):
    """An engine does not say what stock vLLM says; the message has where, and both values."""


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
class Comparison:
    """How much of an engine's values was compared with stock vLLM's.

    Attributes:
        compared: tokens whose log-probabilities were compared.
        ties: requests that went on with another token, as likely as stock vLLM's; what follows in
            them is not compared.
        worst: largest difference of log-probabilities.
    """

    compared: int = 0
    ties: int = 0
    worst: float = 0.0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.compared + other.compared, self.ties + other.ties, max(self.worst, other.worst)
        )

    def __str__(self) -> str:
        ties = f", {self.ties} ties" if self.ties else ""
        return f"{self.compared} tokens, log-probabilities within {self.worst:.1e}{ties}"


@dataclass(frozen=True)
class Reference:
    """What stock vLLM says to a set of requests.

    Attributes:
        outputs: by request, greedy.
        forced: log-probabilities of the same tokens, by request, computed as a prompt's.
        rounding: largest difference of these where another of stock vLLM's engines has computed
            them, which rounds in other places; 0 where there was none.
    """

    outputs: tuple[Output, ...]
    forced: tuple[tuple[float, ...], ...]
    rounding: float = 0.0

    @property
    def noise(self) -> float:
        """How far it is off itself: by rounding, and as generated and as a prompt."""
        return max(self.rounding, self.apart([output.logprobs for output in self.outputs]))

    def apart(self, others: Sequence[Sequence[float]]) -> float:
        """The largest difference to log-probabilities of the same tokens, by request."""
        pairs = zip(others, self.forced, strict=True)
        distances = (_distance(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
        return max(distances, default=0.0)

    @property
    def tolerance(self) -> float:
        """How far an engine's log-probabilities may be off."""
        return max(LEAST_TOLERANCE, NOISE_FACTOR * self.noise)

    def check(self) -> None:
        """That something can be compared with it.

        Raises:
            Differs: it does not agree with itself.
        """
        if not self.noise <= MOST_NOISE:
            raise Differs(
                "stock vLLM does not agree with itself: the log-probabilities of the same tokens, "
                "as generated, as a prompt and with other tensor parallelism, are "
                f"{self.noise:.3g} apart (at most {MOST_NOISE})"
            )

    def compare_outputs(self, got: Sequence[Output], tolerance: float | None = None) -> Comparison:
        """Compare what an engine generated for the same requests.

        Args:
            tolerance: of log-probabilities; by default the reference's own. Another token is the
                same where stock vLLM's are apart by at most twice this.

        Raises:
            Differs: at the first token or log-probability that should be another.
        """
        if tolerance is None:
            tolerance = self.tolerance
        compared, ties, worst = 0, 0, 0.0
        for request, (ours, theirs) in enumerate(zip(got, self.outputs, strict=True)):
            for at, token in enumerate(theirs.tokens):
                where = f"request {request}, token {at}"
                if at >= len(ours.tokens):
                    raise Differs(
                        f"request {request} has {at} tokens instead of {len(theirs.tokens)}"
                    )
                if (other := ours.tokens[at]) != token:
                    best, its = theirs.logprobs[at], theirs.likeliest[at].get(other)
                    if its is not None and best - its <= 2 * tolerance:
                        ties += 1
                        break
                    odds = "is not among its likeliest" if its is None else f"has {its:.4f} there"
                    raise Differs(
                        f"wrong token: {where} is {other}, in stock vLLM {token} with "
                        f"log-probability {best:.4f}; {other} {odds}"
                    )
                compared += 1
                pair = ours.logprobs[at], theirs.logprobs[at]
                worst = max(worst, _apart(*pair, tolerance, where))
        return Comparison(compared, ties, worst)

    def compare_forced(self, got: Sequence[Sequence[float]]) -> Comparison:
        """Compare log-probabilities of its own tokens, by request, computed as a prompt's.

        Raises:
            Differs: at the first one that should be another.
        """
        compared, worst = 0, 0.0
        for request, pair in enumerate(zip(got, self.forced, strict=True)):
            for at, (a, b) in enumerate(zip(*pair, strict=True)):
                compared += 1
                where = f"request {request}, token {at} (as a prompt's)"
                worst = max(worst, _apart(a, b, self.tolerance, where))
        return Comparison(compared, 0, worst)


def _apart(ours: float, theirs: float, tolerance: float, where: str) -> float:
    if not (distance := _distance(ours, theirs)) <= tolerance:
        raise Differs(
            f"wrong log-probability: {where} has {ours:.6f}, in stock vLLM {theirs:.6f}; "
            f"{tolerance:.1e} apart is allowed"
        )
    return distance


def _distance(a: float, b: float) -> float:
    """Infinite where one of them is no number."""
    apart = abs(a - b)
    return apart if apart == apart else float("inf")
