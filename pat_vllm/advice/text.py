"""An advice in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pat_vllm.advice.sides import Replayed
from pat_vllm.advice.verdict import Advice, Gain

PARTS = (
    "Where it comes from: parts of what PAT saves over the best static layout without drafts, "
    "with vLLM's own limits"
)


def rows(advice: Advice) -> Iterator[tuple[str, Replayed]]:
    """(label, side) of the table and the picture."""
    sides = advice.sides
    yield f"static {sides.own.side.layout}, k = 0, vLLM's own limits", sides.own
    if sides.static is not sides.plain and sides.static.side != sides.plain.side:
        yield str(sides.plain.side), sides.plain
    yield str(sides.static.side), sides.static
    if sides.pat.side != sides.pat_plain.side:
        yield str(sides.pat_plain.side), sides.pat_plain
    yield str(sides.pat.side), sides.pat


def heading(advice: Advice) -> str:
    """What was simulated."""
    batch, count = advice.rollouts.batches[0], len(advice.rollouts.batches)
    times = "MODELLED, not measured" if advice.modelled else "measured"
    return (
        f"Simulated, step and switch times {times}. {advice.rollouts.profile.title}; {batch.name}, "
        f"{count} iterations of {len(batch):,} responses of up to {batch.max_tokens:,} tokens, "
        f"acceptance {batch.acceptance:g}, after one from which PAT learns"
    )


def verdict(advice: Advice) -> str:
    """The answer in two sentences."""
    side, kind = advice.sides.static.side, "modelled" if advice.modelled else "simulated"
    assert side.layout is not None
    best = f"Best static layout: {side.layout} (tp={side.layout.tp}), {side.drafts}."
    saved = f"PAT saves {_range(advice.gain)}, {kind}"
    if advice.pays:
        return f"{best} {saved}."
    bar = "what PAT's own work in a step takes" if advice.gain.reaches else "0"
    return f"{best} Nothing to gain here: {saved}; the interval reaches {bar}."


def percents(gain: Gain) -> list[str]:
    """Mean, interval and extremes."""
    parts = (gain.mean, gain.low, gain.high, gain.least, gain.most)
    return [f"{round(part, 3) + 0.0:.1%}" for part in parts]


def _range(gain: Gain) -> str:
    mean, low, high, least, most = percents(gain)
    return f"{mean} (95% interval {low} to {high}; single iterations {least} to {most})"
