"""Which layouts an engine keeps ready where its user does not say. Pure.

Where the GPU is known, the engine's own planner plans the expected batch (`load.py`) in each set of
layouts that may be kept, by modelled step and switch times (`modelled/roofline.py`) and with the KV
cache that the set leaves (`memory_estimate.py`). Where the GPU is not known, a rule decides by
memory. An engine's front end (`prepare.py`), `advise` and `doctor` all choose by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.layout import Experts, Layout
from pat_vllm.modelled.gpus import Device, Gpu, Link, gib, known_gpu, link_of
from pat_vllm.modelled.roofline import Machine
from pat_vllm.models.drafter_size import DrafterSize
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.moe_config import MoEConfig
from pat_vllm.models.quantization import PLAIN, Quantized
from pat_vllm.models.tower_size import TowerSize
from pat_vllm.predictor.draft_schedule import draft_lengths
from pat_vllm.predictor.planner import Planner
from pat_vllm.predictor.whole_batch import best_plan
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.load import Load
from pat_vllm.start.memory_estimate import RankMemory, estimate, static_engine

_MOST_COMPILES = 5
"""The most ranges of batch sizes that an engine compiles for all its layouts together. vLLM has one
for tp=1, and two for any other tp, where it fuses all-reduces with norms in small batches."""
_EARNS = 0.012
"""Share of a batch's time that a further layout has to save, as it costs compilation and graphs.
One layout alone, with all memory to itself, has to save as much against several, as these adapt if
the load is not the expected one."""
_LEAVE = 0.9
"""Share of the KV cache of one layout alone that is enough beside further layouts. If they leave
less and a batch may need more, it is they that have to save `_EARNS`."""
_LARGEST_WEIGHTS = 0.3
"""Share of a device's memory that weights may take where the device's speed is not known."""
_FAR_LESS = 0.5
"""Share of the KV cache of the roomiest static engine. Below it a user is warned of the base layout
that he has named, and where the device's speed is not known, several layouts with heavy weights are
not kept."""
_MARGIN = 0.04
"""Share of a device's memory by which an engine may find less for KV than is computed: 2.8% on one
H100 (`benchmarks/results/2026-11-26-h100.md`), and vLLM's graphs may take more than it estimates.
"""


@dataclass(frozen=True)
class Choice:
    """What an engine keeps ready.

    Attributes:
        layouts: the base layout first.
        experts: PAT's option, resolved; None: the model has no experts.
        found: what was chosen, what it leaves for KV, and how to choose otherwise, in a line.
        warning: that there is too little memory, or one layout only; None: neither is so.
        more_room: options with which a rank has more memory for KV, as "name ... or ...".
        link: what connects the devices; None: not known.
    """

    layouts: tuple[Layout, ...]
    experts: Experts | None
    found: str
    warning: str | None = None
    more_room: str = ""
    link: Link | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The choice as options of PAT's, `base_tp`, `layouts` and `experts`."""
        sizes = [layout.tp for layout in self.layouts]
        experts = {} if self.experts is None else {"experts": self.experts}
        return {"base_tp": sizes[0], "layouts": sizes, **experts}


def choose(
    model_config: Mapping[str, Any],
    pat: PATConfig,
    engine: EngineShape,
    ranks: int,
    device: Device | None,
    *,
    dtype_bytes: int = 2,
    quantized: Quantized = PLAIN,
    drafter: tuple[str, Mapping[str, Any]] | None = None,
    tower: Mapping[str, Any] | None = None,
    load: Load,
) -> Choice:
    """The layouts of an engine. What its user names is kept.

    Args:
        model_config: contents of the model's `config.json`.
        pat: PAT's options.
        engine: its other options; `layouts`, `experts`, `pat`, `drafter`, `tower` and `link` are
            not looked at.
        ranks: number of the engine's ranks.
        device: what each rank runs on; None: nothing is known of it.
        dtype_bytes, quantized: as `ModelSize` has them.
        drafter: of one with weights, vLLM's method, and the contents of its `config.json`.
        tower: contents of the `config.json` of a class with a tower, if the engine takes images.
        load: the batch that is expected.

    Raises:
        ValueError: as `PATConfig.resolve_layouts`.
    """
    mixture = MoEConfig.from_config(model_config)
    try:
        model = ModelSize.of(model_config, dtype_bytes, quantized)
        engine = replace(
            engine,
            drafter=drafter and DrafterSize.of(drafter[0], model, drafter[1]),
            tower=TowerSize.of(tower) if tower else None,
        )
    except ValueError:  # its kind is one whose sizes are not known
        model = None
    link = None if device is None else link_of(device)
    engine = replace(engine, pat=pat, link=link)
    search = _Search(pat, engine, ranks, mixture, model, device)
    sets = list(search.sets())
    if model is None or device is None:
        layouts, how = search.layouts(sets[0]), "nothing is known of the model's memory"
        experts = search.experts(sets[0])
        found, warning = _chosen(layouts, how), search.one_layout(sets[0])
        return Choice(layouts, experts, found, warning, link=link)
    fitting = [sizes for sizes in sets if search.fits(sizes)]
    alone = {tp: search.memory_alone(tp).kv for tp in search.sizes}
    if not fitting:
        best, how = max(sets, key=lambda sizes: search.memory(sizes).kv), "the most room for KV"
    elif len(fitting) == 1:
        best, how = fitting[0], "by options and memory"
    elif gpu := known_gpu(device):
        best = search.fastest(fitting, gpu, load)
        how = f"by modelled times of {load.responses:,} responses"
    else:
        best = search.by_rule(fitting, max(alone.values()))
        how = "by memory, of a device whose speed is not known"
    layouts, memory = search.layouts(best), search.memory(best)
    room = ", ".join(f"tp={tp} {gib(kv)}" for tp, kv in alone.items())
    kv = f"{gib(memory.kv)} of KV a rank (static engines: {room}), by computation"
    return Choice(
        layouts,
        search.experts(best),
        f"{_chosen(layouts, how)}; {kv}",
        search.warning(best, max(alone.values())) or search.one_layout(best),
        search.more_room(best),
        link,
    )


def _chosen(layouts: Sequence[Layout], how: str) -> str:
    """The line that tells a user which layouts were chosen, and how."""
    names = ", ".join(map(str, layouts))
    return f"layouts {names}, {how} (pat.base_tp, pat.layouts and pat.experts choose others)"


@dataclass(frozen=True)
class _Search:
    """The sets of layouts among which to choose. `sizes` are the tps of such a set, ascending."""

    pat: PATConfig
    engine: EngineShape
    ranks: int
    mixture: MoEConfig | None
    model: ModelSize | None
    device: Device | None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """All tps that a layout may have: doublings, the number of ranks and tps that the options
        name, as far as they divide the ranks and the model."""
        named = self.pat.base
        sizes = {self.ranks, *(named << i for i in range(self.ranks.bit_length()))}
        sizes |= {*self.pat.policy_tps(), *(self.pat.layouts or ())}
        divisors = [tp for tp in sorted(sizes) if tp > 0 and self.ranks % tp == 0]
        if self.model is None:
            return tuple(divisors)
        return tuple(tp for tp in divisors if self.model.divides(tp)) or tuple(divisors)

    def sets(self) -> Iterator[tuple[int, ...]]:
        """The sets that may be kept, those with a narrow base layout first. The first is the usual
        one: the base layout, the widest, and what lies in the middle.

        Raises:
            ValueError: as `PATConfig.resolve_layouts` and `PATConfig.resolve_experts`.
        """
        layouts = self.pat.resolve_layouts(self.ranks)
        if self.pat.layouts is not None:
            self.pat.resolve_experts(self.mixture, layouts)
            yield tuple(layout.tp for layout in layouts)
            return
        needed = {*self.pat.policy_tps()}
        bases = [self.pat.base_tp] if self.pat.base_tp is not None else self.sizes
        any_possible = False
        for base in bases:
            wider = [tp for tp in self.sizes if tp % base == 0 and tp > base]
            if any(tp % base for tp in needed):
                continue
            ends = {base, *wider[-1:], *needed}  # in every set of this base that has several
            between = [tp for tp in wider if tp not in ends]
            # One of the others may be added; what lies in the middle comes first.
            middle = between[len(between) // 2 :][:1]
            between = [*middle, *(tp for tp in between if tp not in middle)]
            compiles = sum(1 if tp == 1 else 2 for tp in ends)
            more = [(tp,) for tp in between if compiles + 2 <= _MOST_COMPILES]
            several = [tuple(sorted({*ends, *extra})) for extra in (*more, ())]
            alone = () if needed else ((base,),)
            for chosen in dict.fromkeys((*several, *alone)):
                if self._possible(chosen):
                    any_possible = True
                    yield chosen
        if not any_possible:
            self.pat.resolve_experts(self.mixture, layouts)  # says why
            yield self.sizes

    def _possible(self, sizes: Sequence[int]) -> bool:
        """Whether the experts of the model can lie in all of these layouts."""
        try:
            self.experts(sizes)
        except ValueError:
            return False
        return True

    def layouts(self, sizes: Sequence[int]) -> tuple[Layout, ...]:
        """The layouts of these tps."""
        return tuple(Layout.of(tp, self.ranks) for tp in sizes)

    def experts(self, sizes: Sequence[int]) -> Experts | None:
        """How experts lie in the layouts of these tps.

        Raises:
            ValueError: as `PATConfig.resolve_experts`.
        """
        return self.pat.resolve_experts(self.mixture, self.layouts(sizes))

    def memory(self, sizes: Sequence[int]) -> RankMemory:
        """What a rank takes, and has left for KV, in an engine with these layouts."""
        assert self.device is not None
        return self._memory(sizes, self.device)

    def _memory(self, sizes: Sequence[int], device: Device) -> RankMemory:
        assert self.model is not None
        layouts, experts = self.layouts(sizes), self.experts(sizes)
        return estimate(self.model, replace(self.engine, layouts=layouts, experts=experts), device)

    def memory_alone(self, tp: int) -> RankMemory:
        """What a rank of a static engine of this tp takes, and has left for KV."""
        assert self.model is not None and self.device is not None
        engine = static_engine(self.engine, Layout.of(tp, self.ranks))
        return estimate(self.model, engine, self.device)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether the base layout holds the KV of a request of `max_model_len` tokens, even if the
        device has `_MARGIN` less memory."""
        assert self.device is not None
        left = replace(self.device, memory=int((1 - _MARGIN) * self.device.memory))
        memory = self._memory(sizes, left)
        room = memory.weights + memory.kv <= left.memory  # a user may name the KV
        return room and memory.kv_tokens[sizes[0]] >= self.engine.max_model_len

    def warning(self, sizes: Sequence[int], most: int) -> str | None:
        """A warning if the base layout leaves too little for KV, else None.

        Args:
            most: bytes for KV on a rank of the roomiest static engine.
        """
        memory = self.memory(sizes)
        base, tokens = sizes[0], memory.kv_tokens[sizes[0]]
        room = f"pat.base_tp={base} leaves {gib(memory.kv)} for KV beside weights"
        if not self.fits(sizes):
            problem = (
                f"{room}, {tokens:,} tokens by computation, which may say {_MARGIN:.0%} of the "
                f"memory too much; a request may have {self.engine.max_model_len:,}"
            )
        elif self.names_base and memory.kv < _FAR_LESS * most:
            problem = f"{room} of {gib(memory.weights)}, where a static engine has {gib(most)}"
        else:
            return None
        return f"{problem}. For more room {self.more_room(sizes)}"

    @property
    def names_base(self) -> bool:
        """Whether a user has named the base layout, or layouts that decide it."""
        return self.pat.base_tp is not None or self.pat.layouts is not None

    def more_room(self, sizes: Sequence[int]) -> str:
        """Options with which a rank has more memory for KV."""
        wider = [str(tp) for tp in self.sizes if tp % sizes[0] == 0 and tp > sizes[0]]
        ways = ["raise gpu_memory_utilization", "lower max_model_len", "lower max_num_seqs"]
        if wider:
            auto = "leave pat.base_tp and pat.layouts at 'auto', or " if self.names_base else ""
            ways.insert(0, f"{auto}name pat.base_tp={' or '.join(wider)}")
        return f"{', '.join(ways[:-1])}, or {ways[-1]}"

    def one_layout(self, sizes: Sequence[int]) -> str | None:
        """Why an engine that may switch keeps one layout; None: it keeps several, or its user has
        asked for one."""
        if len(sizes) > 1 or self.ranks == 1 or self.pat.layouts or self.pat.base_tp == self.ranks:
            return None
        several = [others for others in self.sets() if len(others) > 1]
        longest = f"max_model_len={self.engine.max_model_len}"
        if not several or self.model is None or self.device is None:
            why = f"the model splits over no other part of {self.ranks} ranks"
            help = "another tensor_parallel_size may have more"
        elif fitting := [others for others in several if self.fits(others)]:
            why = "further ones take more from the KV cache than switches save, by computation"
            help = (
                f"name pat.layouts={list(max(fitting))} to have more, and let max_num_seqs and "
                "max_model_len be what your batches have"
            )
        elif any(self.memory(others).kv > 0 for others in several):
            why = f"beside further ones no request of {longest} has room"
            help = f"for more, {self.more_room(sizes)}"
        else:
            why = "the weights of a narrower base layout leave no room for KV"
            help = "only GPUs with more memory, or more of them, have room for more"
        return f"one layout, tp={sizes[0]}, is kept, and the engine never switches: {why}; {help}"

    def by_rule(self, sets: Sequence[tuple[int, ...]], most_kv: int) -> tuple[int, ...]:
        """The choice where no times can be modelled: by what weights take and KV keeps.

        Args:
            most_kv: bytes for KV on a rank of the roomiest static engine.
        """
        assert self.device is not None
        most = _LARGEST_WEIGHTS * self.device.memory
        several = [sizes for sizes in sets if len(sizes) > 1]
        light = [sizes for sizes in several if self.memory(sizes).weights <= most]
        if light:
            return light[0]
        roomy = [sizes for sizes in several if self.memory(sizes).kv >= _FAR_LESS * most_kv]
        return max(roomy or sets, key=lambda sizes: self.memory(sizes).kv)

    def fastest(self, sets: Sequence[tuple[int, ...]], gpu: Gpu, load: Load) -> tuple[int, ...]:
        """The set with the fewest layouts among those within `_EARNS` of the fastest set's time."""
        seconds = {sizes: self._seconds(sizes, gpu, load) for sizes in sets}
        several = [sizes for sizes in sets if len(sizes) > 1]
        alone = [sizes for sizes in sets if len(sizes) == 1]
        if several and alone:
            best, only = (min(group, key=seconds.__getitem__) for group in (several, alone))
            # Time of the best single layout over that of the best several, in smaller batches.
            ratios = [
                self._seconds(only, gpu, part) / self._seconds(best, gpu, part)
                for part in load.smaller()
            ]
            share = sum(ratios, seconds[only] / seconds[best]) / (1 + len(ratios))
            # Requests wait for KV where further layouts leave less than a batch needs (at most
            # `_LEAVE` of what the base layout alone would have): then several have to save time.
            most = min(load.most_tokens, _LEAVE * self._room(best[:1]))
            short = self._room(best) < most and not load.at_most
            if share * (1 + (-_EARNS if short else _EARNS)) < 1:
                several = []
        if several:
            enough = min(seconds[sizes] for sizes in several) * (1 + _EARNS)
            near = [sizes for sizes in several if seconds[sizes] <= enough]
            return min(near, key=lambda sizes: (len(sizes), seconds[sizes]))
        enough = min(seconds[sizes] for sizes in alone) * (1 + _EARNS)
        # Room for more tokens is the safer choice.
        return max((sizes for sizes in alone if seconds[sizes] <= enough), key=self._room)

    def _room(self, sizes: Sequence[int]) -> int:
        """Tokens whose KV all replicas of the base layout hold."""
        return self.memory(sizes).kv_tokens[sizes[0]] * (self.ranks // sizes[0])

    def _seconds(self, sizes: Sequence[int], gpu: Gpu, load: Load) -> float:
        """Modelled seconds of a batch in an engine with these layouts, by the best plan."""
        assert self.model is not None
        machine = Machine(self.model, gpu, self.experts(sizes), drafter=self.engine.drafter)
        layouts, room = self.layouts(sizes), self.memory(sizes).kv_tokens
        most = {layout.tp: self.engine.limits(layout).max_num_seqs for layout in layouts}
        planner = Planner(
            layouts, machine.step, machine.switch(layouts[0]), max_num_seqs=most, kv_tokens=room
        )
        lengths = draft_lengths(self.engine.num_speculative_tokens, None)
        return best_plan(planner, load.batch, lengths).planned
