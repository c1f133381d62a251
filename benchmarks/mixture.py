"""`python -m benchmarks.mixture`: a mixture of experts, cut, spread, and both in turn. Simulated.

Every side has the same batches, the same concurrency and the same router: each static layout; PAT
with layouts whose experts are cut, with ones whose experts are spread, and with both kinds. Static
engines have the memory that their own weights leave; PAT's ranks hold those of its base layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

import typer

from benchmarks.common import machine, write_results
from benchmarks.replaying import PolicyResult, Replayer
from pat_vllm.cli.results import table
from pat_vllm.layout import Layout
from pat_vllm.mixture import WantedExperts
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.hardware import measured_noise, modelled_profile
from pat_vllm.simulator.traces import LengthTrace, generator
from pat_vllm.simulator.truth import ReplayedTruth

SKEW = 1.0
"""A Zipf exponent for which popularities are as concentrated (1 - entropy / log 128 = 0.14) as was
published by others of Qwen3-30B-A3B: 0.11 for a thousand tokens of prose, code and mathematics,
0.15 for eight thousand of Python alone (mcp-tool-shop-org.github.io/gpu-container/handbook/derisk).
The most popular expert had 4 and 6% of all choices there, here it has 10%."""
MOEBIUS = (1.16, 1.25)
"""Published by others: the better static layout over Moebius (arXiv 2606.26607), on rollouts of
Qwen3-235B with 8 x H200."""
_PER_PROMPT = 8
_BASES = (1, 2, 4)


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        workload: of `pat_vllm.simulator.traces`.
        prompts: of a batch, with 8 responses to each.
        skew: of routing.
    """

    gpu: str
    skew: float
    workload: str = "grpo"
    prompts: int = 512
    max_tokens: int = 8192
    model: str = "qwen3-30b-a3b"
    ranks: int = 8


@dataclass(frozen=True)
class Side:
    """What was replayed.

    Attributes:
        name: "static", or PAT's kinds of layouts.
        layout: the static one, or PAT's base.
        seconds: of all batches, modelled.
        switches: of a batch.
        path: PAT's layouts in the last batch, and the live requests at which it went there.
    """

    name: str
    layout: str
    seconds: float
    switches: float = 0.0
    path: str = ""


def run_setting(setting: Setting, seeds: int) -> list[Side]:
    """Replay a setting's batches under every side; PAT learns from one before."""
    make = generator(setting.workload)
    batches = [
        make(setting.prompts * _PER_PROMPT, setting.max_tokens, seed) for seed in range(seeds + 1)
    ]
    alone = _profile(setting)
    sides = []
    for layout in alone.layouts:
        truth = ReplayedTruth(alone, measured_noise())
        replayer = Replayer(alone, batches[:-1])
        result = replayer.replay(str(layout), StayPolicy(layout), truth)
        sides.append(Side("static", str(layout), result.seconds))
    kinds: tuple[tuple[str, WantedExperts], ...] = (("cut", "tp"), ("spread", "ep"))
    for base in _BASES:
        both: tuple[tuple[str, WantedExperts], ...] = (("both", "auto"),) if base == 1 else ()
        for name, experts in (*kinds, *both):
            result = _adaptive(setting, alone, base, experts, batches)
            path = _path(result)
            sides.append(Side(name, path.split()[0], result.seconds, result.switches, path))
    return sides


def _profile(
    setting: Setting, sizes: Sequence[int] | None = None, experts: WantedExperts = "auto"
) -> Profile:
    """Modelled; with `sizes` of PAT's engine, else of static ones."""
    return modelled_profile(
        setting.model,
        setting.gpu,
        setting.ranks,
        layouts=sizes,
        experts=experts,
        skew=setting.skew,
        static=sizes is None,
    )


def _adaptive(
    setting: Setting,
    alone: Profile,
    base: int,
    experts: WantedExperts,
    batches: Sequence[LengthTrace],
) -> PolicyResult:
    sizes = [tp for tp in (1, 2, 4, 8) if tp >= base]
    ours = _profile(setting, sizes, experts)
    # Steps are the same; the static engines' profile has some with more KV.
    steps = tuple(one for one in alone.steps if one.layout in ours.layouts)
    truth = ReplayedTruth(ours.model_copy(update={"steps": steps}), measured_noise())
    replayer = Replayer(ours, batches[:-1], batches[-1:])
    return replayer.replay("PAT", replayer.adaptive(ours), truth)


def _path(result: PolicyResult) -> str:
    last = result.runs[-1]
    went = (f"{switch.target}@{switch.num_seqs}" for switch in last.switches_on_the_way)
    return " ".join([str(last.timeline[0].layout), *went])


def settings(gpus: Sequence[str], workloads: Sequence[str], prompts: int) -> Iterator[Setting]:
    """All combinations."""
    for gpu, workload, skew in product(gpus, workloads, (0.0, SKEW)):
        yield Setting(gpu, skew, workload, prompts)


HEADERS = (
    "GPUs", "lengths", "skew", "tp1dp8", "best cut", "best spread", "PAT, cut", "PAT, spread",
    "PAT, both", "best static / best PAT", "PAT's last batch",
)  # fmt: skip


def row(setting: Setting, sides: Sequence[Side]) -> tuple[str, ...]:
    """A line of the table; seconds of all batches."""
    static = [one for one in sides if one.name == "static"]
    kinds: dict[str, list[Side]] = {"whole": [], "cut": [], "spread": []}
    for one in static:
        layout = Layout.parse(one.layout)
        kinds["whole" if layout.tp == 1 else "spread" if layout.experts == "ep" else "cut"] += [one]

    def best(some: Sequence[Side]) -> Side:
        return min(some, key=lambda one: one.seconds)

    ours = {
        name: best([one for one in sides if one.name == name]) for name in ("cut", "spread", "both")
    }
    first = best([*ours.values()])
    return (
        f"{setting.ranks} x {setting.gpu}",
        setting.workload,
        f"{setting.skew:g}",
        *(f"{(one := best(some)).seconds:.1f} ({one.layout})" for some in kinds.values()),
        *(f"{one.seconds:.1f} (base {one.layout})" for one in ours.values()),
        f"{best(static).seconds / first.seconds:.3f}",
        first.path,
    )


def text(results: Sequence[tuple[Setting, list[Side]]], seeds: int) -> str:
    """Markdown."""
    one = results[0][0]
    by = table(HEADERS, [row(*each) for each in results])
    return (
        f"Simulated on MODELLED profiles of {one.model}, nothing measured. {one.prompts} prompts x "
        f"{_PER_PROMPT} responses of up to {one.max_tokens:,} tokens; seconds of {seeds} batches, "
        "after one that PAT learns from; of each kind the best base layout. skew: Zipf exponent of "
        f"the experts' popularity, an assumption ({SKEW:g} is about as concentrated as published "
        f"of this model).\n\n{by}\n"
        f"Published by others, not by us: Moebius, {MOEBIUS[0]} to {MOEBIUS[1]} over the better "
        "static layout, Qwen3-235B on 8 x H200.\n"
    )


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    gpu: Annotated[list[str], typer.Option(help="May be repeated.")] = ["H100", "H200"],  # noqa: B006
    workload: Annotated[list[str], typer.Option(help="May be repeated.")] = ["grpo", "deepscaler"],  # noqa: B006
    prompts: int = 512,
    seeds: Annotated[int, typer.Option(min=1, help="Batches, after one to learn from.")] = 2,
    processes: Annotated[int, typer.Option(min=1)] = 1,
    write: Annotated[bool, typer.Option(help="Write to benchmarks/results.")] = False,
) -> None:
    """Simulate and compare."""
    facts, every = machine(), list(settings(gpu, workload, prompts))
    results: list[tuple[Setting, list[Side]]] = []
    with ProcessPoolExecutor(processes) as pool:
        for setting, sides in zip(
            every, pool.map(run_setting, every, [seeds] * len(every)), strict=True
        ):
            results.append((setting, sides))
            print(" | ".join(row(setting, sides)), flush=True)
    found = text(results, seeds)
    if write:
        body = {"modelled": True, "moebius_published": MOEBIUS}
        body["settings"] = [
            {"setting": asdict(one), "sides": [asdict(side) for side in sides]}
            for one, sides in results
        ]
        write_results("mixture-modelled", facts, body, found)
    else:
        print(found)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.mixture")
