"""Correlation of responses of one prompt: shared gamma frailty. Pure.

The hazard of every response of a group is multiplied by the group's frailty Z, gamma distributed
with mean 1 and variance theta (Clayton 1978, Hougaard 2000). Given the cumulative hazard H of the
population, that of a group with Z = 1 is H0 = (exp(theta H) - 1) / theta, and given what the
group's responses did so far, a of them ended, Z is gamma distributed with shape 1/theta + a and
rate 1/theta + sum of H0(length): censored and running ones need no special care, as they would
with a mean of log-lengths. A response without siblings keeps exactly the population's hazard.
"""

from __future__ import annotations

import numpy as np

from pat_vllm.predictor.state import Bools, Floats, Ints

THETAS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Considered variances of the frailty. Kendall's rank correlation of two siblings is
theta / (theta + 2), so up to 0.6."""

_EVIDENCE = 3.0
"""Log-likelihood ratio above which siblings are believed to be correlated."""

_EXPONENT = 500.0
"""Largest exponent, for finite results."""


def log_likelihoods(hazard: Floats, ended: Bools, group: Ints) -> Floats:
    """Log-likelihood of each of `THETAS` but for a common constant, float64 [thetas].

    Args:
        hazard: the population's H at the responses' lengths, float64 [n].
        ended: whether they ended there, bool [n].
        group: their groups, int64 [n].
    """
    _, member = np.unique(group, return_inverse=True)
    ends = np.bincount(member, weights=ended).astype(np.int64)
    result = np.empty(len(THETAS))
    for i, theta in enumerate(THETAS):
        if not theta:
            result[i] = -hazard.sum()
            continue
        scaled = np.minimum(theta * hazard, _EXPONENT)
        total = np.bincount(member, weights=np.expm1(scaled))
        rising = np.concatenate(([0.0], np.log1p(theta * np.arange(ends.max())).cumsum()))
        result[i] = (
            rising[ends].sum() - ((1 / theta + ends) * np.log1p(total)).sum() + scaled[ended].sum()
        )
    return result


def best_theta(likelihoods: Floats) -> float:
    """The most likely of `THETAS`; 0 without clear evidence."""
    best = int(np.argmax(likelihoods))
    return THETAS[best] if likelihoods[best] > likelihoods[0] + _EVIDENCE else 0.0


def group_sums(
    values: tuple[Floats, Floats], groups: tuple[Ints, Ints], ended: Bools
) -> tuple[Ints, Floats, Floats]:
    """Of the running responses' groups: sums of the values, and how many ended.

    Args:
        values: of the running responses [n], and of the finished ones [m].
        groups: of the same.
        ended: of the finished ones, whether they ended by themselves, bool [m].

    Returns:
        The index of each running response's group, int64 [n]; sums and counts, float64 [groups].
    """
    names, member = np.unique(groups[0], return_inverse=True)
    count = len(names)
    total = np.bincount(member, values[0], count).astype(np.float64)
    ends = np.zeros(count)
    if len(groups[1]):
        at = np.minimum(np.searchsorted(names, groups[1]), count - 1)
        known = names[at] == groups[1]
        total += np.bincount(at[known], values[1][known], count)
        ends += np.bincount(at[known], ended[known], count)
    return member.astype(np.int64), total, ends


def conditional(hazard: Floats, theta: float) -> Floats:
    """theta * H0, of a group with Z = 1, from the population's H."""
    return np.expm1(np.minimum(theta * hazard, _EXPONENT))


def draw(
    exponential: Floats,
    start: Floats,
    member: Ints,
    total: Floats,
    ends: Floats,
    theta: float,
    random: np.random.Generator,
) -> Floats:
    """The population's H at which responses end, float64 [n, futures].

    In each future a group has one frailty, so its responses are long or short together.

    Args:
        exponential: standard exponential draws, float64 [n, futures].
        start: `conditional` at the current lengths, float64 [n].
        member: index of each one's group, int64 [n].
        total: sum of `conditional` over each group's responses, float64 [groups].
        ends: how many of each group have ended, float64 [groups].
    """
    shape = np.broadcast_to((1 / theta + ends)[:, None], (len(ends), exponential.shape[1]))
    frailty = random.standard_gamma(shape) / (1 + total)[:, None]
    # Of a hazard whose frailty is all but 0 a response has no end: its bound decides.
    beyond = exponential / np.maximum(frailty, 1e-200)[member]
    return np.log1p(start[:, None] + beyond) / theta


def dispersion(expected: Floats, ended: Bools, group: Ints, theta: float) -> float:
    """Variance of how many responses end, relative to independent ones.

    The larger of what the frailty says, and of Pearson's around this batch's own level: short
    responses cluster more than under a gamma frailty, whose siblings differ little early on.

    Args:
        expected: H at the responses' lengths, float64 [n].
        ended: whether they ended there, bool [n].
        group: their groups, int64 [n].
        theta: variance of the frailty.
    """
    _, member = np.unique(group, return_inverse=True)
    level = max(float(expected.sum()), 1e-12)
    share = np.bincount(member, weights=expected) / level
    ends = np.bincount(member, weights=ended)
    count = ends.sum()
    pearson = ((ends - count * share) ** 2).sum() / max(count, 1.0)
    return float(max(1 + theta * level * (share**2).sum(), pearson))
