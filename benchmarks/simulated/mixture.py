"""A mixture of experts, cut, spread, and both in turn.

Every side has the same batches, the same concurrency and the same router: each static layout; PAT
with layouts whose experts are cut, with ones whose experts are spread, and with both kinds. Static
engines have the memory that their own weights leave; PAT's ranks hold those of its base layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from benchmarks.simulated.replay import Batches, Comparison, Replayed, Setting
from pat_vllm.layout import Layout
from pat_vllm.mixture import WantedExperts
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.hardware import measured_noise
from pat_vllm.simulator.truth import ReplayedTruth

SKEW = 1.0
"""A Zipf exponent for which popularities are as concentrated (1 - entropy / log 128 = 0.14) as was
published by others of Qwen3-30B-A3B: 0.11 for a thousand tokens of prose, code and mathematics,
0.15 for eight thousand of Python alone (mcp-tool-shop-org.github.io/gpu-container/handbook/derisk).
The most popular expert had 4 and 6% of all choices there, here it has 10%."""
PER_PROMPT = 8
"""Responses to a prompt."""
_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Side:
    """What was replayed.

    Attributes:
        name: "static", or PAT's kinds of layouts.
        layout: the static one, or PAT's base.
        seconds: of all batches, modelled.
        path: PAT's layouts in the last batch, and the live requests at which it went there.
    """

    name: str
    layout: str
    seconds: float
    path: str = ""


def run(setting: Setting, count: int) -> list[Side]:
    """Replay so many batches of a setting under every side."""
    batches, alone = setting.batches(count), setting.profile(static=True)
    static = batches.replay_static(ReplayedTruth(alone, measured_noise()), alone)
    sides = [Side("static", str(layout), result.seconds) for layout, result in static.items()]
    kinds: tuple[tuple[str, WantedExperts], ...] = (("cut", "tp"), ("spread", "ep"))
    for base in _SIZES[:-1]:
        both: tuple[tuple[str, WantedExperts], ...] = (("both", "auto"),) if base == 1 else ()
        for name, experts in (*kinds, *both):
            result = _adaptive(setting, batches, alone, base, experts)
            sides.append(Side(name, result.path.split()[0], result.seconds, result.path))
    return sides


def _adaptive(
    setting: Setting, batches: Batches, alone: Profile, base: int, experts: WantedExperts
) -> Replayed:
    ours = setting.profile(layouts=[tp for tp in _SIZES if tp >= base], experts=experts)
    # Steps are the same; the static engines' profile has some with more KV.
    steps = tuple(step for step in alone.steps if step.layout in ours.layouts)
    truth = ReplayedTruth(ours.model_copy(update={"steps": steps}), measured_noise())
    return batches.replay("PAT", batches.adaptive(ours), truth, ours)


def settings(gpus: Sequence[str], workloads: Sequence[str], prompts: int) -> Iterator[Setting]:
    """All combinations, with even and with skewed routing."""
    for gpu, workload, skew in product(gpus, workloads, (0.0, SKEW)):
        yield Setting(
            gpu, "qwen3-30b-a3b", prompts * PER_PROMPT, 8192, 0.0, 0.0, workload, "", skew
        )


def row(setting: Setting, sides: Sequence[Side]) -> tuple[str, ...]:
    """Cells; seconds of all batches."""
    kinds: dict[str, list[Side]] = {"whole": [], "cut": [], "spread": []}
    for side in (side for side in sides if side.name == "static"):
        layout = Layout.parse(side.layout)
        kind = "whole" if layout.tp == 1 else "spread" if layout.experts == "ep" else "cut"
        kinds[kind].append(side)

    def best(some: Sequence[Side]) -> Side:
        return min(some, key=lambda side: side.seconds)

    static = [best(some) for some in kinds.values()]
    ours = [best([s for s in sides if s.name == name]) for name in ("cut", "spread", "both")]
    first = best(ours)
    return (
        f"{setting.ranks} x {setting.gpu}",
        setting.workload,
        f"{setting.skew:g}",
        *(f"{side.seconds:.1f} ({side.layout})" for side in static),
        *(f"{side.seconds:.1f} (base {side.layout})" for side in ours),
        f"{best(static).seconds / first.seconds:.3f}",
        first.path,
    )


def comparison(count: int) -> Comparison[Setting, list[Side]]:
    """Over so many batches of each setting."""
    headers = (
        "GPUs", "lengths", "skew", "tp1dp8", "best cut", "best spread", "PAT, cut", "PAT, spread",
        "PAT, both", "best static / best PAT", "PAT's last batch",
    )  # fmt: skip
    text = (
        "Simulated on MODELLED profiles of Qwen3-30B-A3B, nothing measured. "
        f"{PER_PROMPT} responses to a prompt, of up to 8,192 tokens; seconds of {count} batches, "
        "after one that PAT learns from; of each kind the best base layout. skew: Zipf exponent of "
        f"the experts' popularity, an assumption ({SKEW:g} is about as concentrated as published "
        "of this model)."
    )
    return Comparison("mixture-modelled", text, headers, partial(run, count=count), row)
