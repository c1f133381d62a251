"""What switching is worth, measured: control batches against those beside them. Pure.

A policy keeps some batches in the best static layout. Batches change in the course of a training,
so each control batch is compared with its neighbours alone: with d the mean of the logarithms of
their seconds per generated token, less that of the control batch, the ratio is exp(mean of d), with
Student's interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pat_vllm.reporting.values import BatchReport, ControlComparison

_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's 97.5% quantiles for 1, 2, ... degrees of freedom."""


def compare(batches: Sequence[BatchReport]) -> ControlComparison | None:
    """Compare control batches with the batches before and after each.

    Control batches in which a user has switched are left out, as are batches without a token.

    Args:
        batches: in the order of time.

    Returns:
        None where fewer than two control batches can be compared.
    """
    batches = [batch for batch in batches if batch.tokens and batch.seconds > 0]
    differences = []
    for index, control in enumerate(batches):
        beside = [
            math.log(other.seconds / other.tokens)
            for other in (*batches[max(0, index - 1) : index], *batches[index + 1 : index + 2])
            if not other.control
        ]
        if control.control and not control.switches and beside:
            own = math.log(control.seconds / control.tokens)
            differences.append(statistics.mean(beside) - own)
    if len(differences) < 2:
        return None
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = _t_quantile(len(differences) - 1) * error
    return ControlComparison(
        len(differences), math.exp(mean), math.exp(mean - half), math.exp(mean + half)
    )


def _t_quantile(degrees: int) -> float:
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
