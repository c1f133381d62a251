"""What the replays say: whether PAT pays, how sure that is, and where it comes from. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pat_vllm.advice.advise_options import AdviseOptions
from pat_vllm.advice.rollouts import Rollouts, rollouts_of
from pat_vllm.advice.simulations import (
    PLANNED,
    Config,
    Gain,
    Results,
    best,
    gain,
    replay,
    seconds_of,
)
from pat_vllm.models.checkpoint import WithDefaults


class Source(NamedTuple):
    """A part of what PAT saves, and which two configurations are compared."""

    gain: Gain
    meaning: str


@dataclass(frozen=True)
class Advice:
    """What is said to the user.

    Attributes:
        own: the best static layout without drafts, with vLLM's own limits.
        plain: the best static layout without drafts, at equal concurrency.
        static: the best static layout with its best draft length, at equal concurrency.
        pat_plain: PAT without drafts.
        pat: PAT; the same as `pat_plain` where no drafts are accepted.
        ours: PAT as advised: the faster of the two.
        gain: of `ours` over `static`.
        sources: of all that PAT saves over `own`, by name: "concurrency", "layout", "draft length".
    """

    rollouts: Rollouts
    results: Results
    own: Config
    plain: Config
    static: Config
    pat_plain: Config
    pat: Config
    ours: Config
    gain: Gain
    sources: Mapping[str, Source]

    @property
    def pays(self) -> bool:
        """Whether there is something to gain; see `Gain.reaches`."""
        return self.gain.reaches is None

    @property
    def modelled(self) -> bool:
        """Whether step and switch times were modelled rather than measured."""
        return self.rollouts.profile.kind == "modelled"

    @property
    def drafts(self) -> bool:
        """Whether drafts make PAT faster."""
        return self.ours != self.pat_plain

    def seconds(self, config: Config) -> tuple[float, ...]:
        """Of each reported batch."""
        return seconds_of(self.results[config])

    @property
    def shown(self) -> list[Config]:
        """Configurations of the table and the picture."""
        shown = [self.own, self.plain, self.static]
        if self.rollouts.all_layouts:
            for layout in self.rollouts.static.layouts:
                of_layout = [
                    config
                    for config in self.results
                    if config.layout == layout and not config.own_limits
                ]
                shown += [Config(layout), best(self.results, of_layout)]
        return list(dict.fromkeys((*shown, self.pat_plain, self.pat)))

    @property
    def path(self) -> str:
        """PAT's layouts in the last batch, and the live requests at which it went there."""
        report = self.results[self.ours][-1]
        begins = f"begins in {report.timeline[0].layout}"
        if not report.switches_on_the_way:
            return f"{begins} and stays there"
        went = (f"{switch.target} at {switch.num_seqs}" for switch in report.switches_on_the_way)
        return f"{begins}, switches to {', to '.join(went)} live requests"

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in seconds of each reported batch, gains as fractions."""
        profile, batches = self.rollouts.profile, self.rollouts.batches
        switches = [len(report.switches_on_the_way) for report in self.results[self.ours]]
        content = {
            "simulated": True,
            "step_and_switch_times": profile.kind,
            "profile": {
                "title": profile.title,
                "note": profile.note,
                "kv_tokens": profile.kv_tokens,
            },
            "responses": len(batches[0]),
            "max_tokens": batches[0].max_tokens,
            "lengths": batches[0].name,
            "acceptance": batches[0].acceptance,
            "replayed_drafts": asdict(give) if (give := self.rollouts.drafts) else None,
            "pays": self.pays,
            "gain_over_best_static": asdict(self.gain),
            "best_static": self._to_json(self.static),
            "pat": {
                **self._to_json(self.ours),
                "switches_per_batch": statistics.mean(switches),
                "last_batch": self.path,
            },
            "comes_from": {
                name: {**asdict(source.gain), "meaning": source.meaning}
                for name, source in self.sources.items()
            },
            "sides": {
                "best_static_plain_vllm_limits": self._to_json(self.own),
                "best_static_plain": self._to_json(self.plain),
                "pat_plain": self._to_json(self.pat_plain),
                "pat": self._to_json(self.pat),
            },
        }
        if self.rollouts.all_layouts:
            content["all"] = {str(config): self._to_json(config) for config in self.shown}
        return content

    def _to_json(self, config: Config) -> dict[str, Any]:
        layout = config.layout
        static = (
            {} if layout is None else {"layout": str(layout), "tensor_parallel_size": layout.tp}
        )
        return {**static, "drafts": config.drafts, "seconds": self.seconds(config)}


def advise(
    options: AdviseOptions,
    processes: int = 1,
    with_defaults: WithDefaults = lambda config: None,
) -> Advice:
    """Replay what is asked about, and say what follows.

    Args:
        processes: processes among which the work is spread.
        with_defaults: for the checkpoint's config.

    Raises:
        ValueError: an option or a file is wrong, or cannot be read.
    """
    rollouts = rollouts_of(options, with_defaults)
    results = replay(rollouts, processes)
    static = [config for config in results if config.layout and not config.own_limits]
    own = best(results, [config for config in results if config.own_limits])
    plain = best(results, [config for config in static if config == Config(config.layout)])
    fastest = best(results, static)
    drafted = len(rollouts.draft_lengths) > 1
    pat_plain, pat = Config(None), Config(None, PLANNED) if drafted else Config(None)

    def over(ours: Config, theirs: Config) -> Gain:
        return gain(seconds_of(results[ours]), seconds_of(results[theirs]))

    ours = best(results, (pat_plain, pat))
    sources = {
        "concurrency": Source(
            over(plain, own),
            "static, k = 0: wide replicas run as many requests per GPU as narrow ones, against "
            "vLLM's own limits",
        ),
        "layout": Source(over(pat_plain, plain), "k = 0: PAT against the best static layout"),
    }
    if drafted:
        fixed = max(0.0, over(fastest, plain).mean)
        sources["draft length"] = Source(
            over(pat, pat_plain),
            f"PAT with drafts against PAT without; the best static layout's ({fastest.drafts}) "
            f"save it {fixed:.1%}",
        )
    return Advice(
        rollouts,
        results,
        own,
        plain,
        fastest,
        pat_plain,
        pat,
        ours,
        gain=over(ours, fastest),
        sources=sources,
    )
