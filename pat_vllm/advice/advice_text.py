"""An advice in words. Pure."""

from __future__ import annotations

from pat_vllm.advice.simulations import Gain
from pat_vllm.advice.verdict import Advice

PARTS = (
    "Where it comes from: parts of what PAT saves over the best static layout without drafts, "
    "with vLLM's own limits"
)


def heading(advice: Advice) -> str:
    """What was simulated."""
    batch, count = advice.rollouts.batches[0], len(advice.rollouts.batches)
    times = "MODELLED, not measured" if advice.modelled else "measured"
    responses = f"{len(batch):,} responses of up to {batch.max_tokens:,} tokens"
    if batch.has_turns:
        responses = (
            f"{len(batch.trajectories):,} trajectories of up to {batch.max_tokens:,} tokens, "
            f"{len(batch):,} turns"
        )
    learns = f"acceptance {batch.acceptance:g}, after one from which PAT learns"
    if count == 1:
        replayed = f"trace of {responses}, {learns.replace('one', 'the same trace')}"
    else:
        replayed = f"{count} iterations of {responses}, {learns}"
    title = advice.rollouts.profile.title
    return f"Simulated, step and switch times {times}. {title}; {batch.name}, {replayed}"


def of_drafts(advice: Advice) -> str:
    """What drafts would have given to the earlier rollouts; empty: their texts are not known."""
    if (give := advice.rollouts.drafts) is None:
        return ""
    taken = f"an acceptance of {give.acceptance:.2f} is taken from there"
    if not advice.rollouts.batches[0].acceptance:
        taken = "the profile has no steps with drafts, so that none are simulated"
    return (
        f"Drafts, replayed from {give.responses:,} responses of the last iteration (k = {give.k}): "
        f"{give.own:.2f} tokens a step from a request's own text, {give.earlier:.2f} with earlier "
        f"responses to its prompt, which {give.repeated:.0%} have; {taken}."
    )


def verdict(advice: Advice) -> str:
    """The answer in two or three sentences."""
    static, kind = advice.static, "modelled" if advice.modelled else "simulated"
    assert static.layout is not None
    best = f"Best static layout: {static.layout} (tp={static.layout.tp}), {static.drafts}."
    gain, single = advice.gain, len(advice.rollouts.batches) == 1
    mean, low, high, least, most = percents(gain)
    if slower := round(gain.mean, 3) < 0:
        mean, low, high, least, most = map(_as_slower, percents(gain))
    spread = f"95% interval {low} to {high}; single iterations {least} to {most}"
    if single:
        spread = "of this trace alone"
    said = f"PAT {'is' if slower else 'saves'} {mean} ({spread}), {kind}"
    if advice.pays:
        return f"{best} {said}."
    if slower:
        reason = ""
    else:
        bar = "what PAT's own work in a step takes" if gain.reaches else "0"
        reason = f"; {'that is no more than' if single else 'the interval reaches'} {bar}"
    return f"{best} Nothing to gain here: {said}{reason}. Take the static layout."


def percents(gain: Gain) -> list[str]:
    """Mean, interval and extremes."""
    parts = (gain.mean, gain.low, gain.high, gain.least, gain.most)
    return [f"{round(part, 3) + 0.0:.1%}" for part in parts]


def _as_slower(saved: str) -> str:
    return f"{saved[1:]} slower" if saved.startswith("-") else f"{saved} faster"
