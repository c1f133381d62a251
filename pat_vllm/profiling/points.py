"""The points that a profile may hold, and the limits within which they are possible. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import NamedLayout

SHORT_CONTEXT = 64
"""Tokens of a context whose attention hardly costs anything."""
LONGEST_PROMPT = 512
"""A longer prefill is made up of several prompts, as in a batch that arrives."""

_MOST_STEPS = 16
"""Decode steps at a point; contexts grow by as much."""
_LEAST_STEPS = 3
_STEPS_IF_ALL_ACCEPTED = 5
"""Steps for which contexts have room at a point where every draft is accepted."""


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can be asked to do.

    Attributes:
        layouts: base first.
        max_num_seqs: requests that a replica runs at once, by tp.
        max_batch_tokens: tokens that a step of a replica may compute, by tp.
        max_model_len: tokens of the longest context.
        block_size: tokens in a KV block.
        blocks: KV blocks that requests of a replica can have, by tp.
        draft_lengths: those above 0 that steps may be measured with, ascending.
        misses: whether a step may have a draft length and verify no drafts, as when nothing was
            found. Where it may not, drafts are filled up and always verified.
    """

    layouts: tuple[Layout, ...]
    max_num_seqs: Mapping[int, int]
    max_batch_tokens: Mapping[int, int]
    max_model_len: int
    block_size: int
    blocks: Mapping[int, int]
    draft_lengths: tuple[int, ...] = ()
    misses: bool = False

    @property
    def kv_tokens(self) -> dict[int, int]:
        """Tokens whose KV a replica's memory holds, by tp."""
        return {tp: blocks * self.block_size for tp, blocks in self.blocks.items()}

    @property
    def room(self) -> int:
        """Decode steps for which a point's contexts leave room."""
        return max(_LEAST_STEPS, min(_MOST_STEPS, self.max_model_len // 4))

    def room_for(self, drafts: int) -> int:
        """Tokens by which a context may grow at a point that verifies so many drafts of each."""
        return self.room + _STEPS_IF_ALL_ACCEPTED * drafts

    def longest_context(self, tp: int, batch: int, drafts: int = 0) -> int:
        """Most tokens that each of `batch` contexts may begin with; below 1 if they do not fit."""
        in_memory = self.blocks[tp] // batch * self.block_size
        return min(self.max_model_len, in_memory) - self.room_for(drafts) - 1

    def most_requests(self, tp: int, drafts: int = 0) -> int:
        """Requests with short contexts, and so many drafts each, that a replica can run at once."""
        each = -(-(self.short + self.room_for(drafts) + 1) // self.block_size)
        in_step = self.max_batch_tokens[tp] // (1 + drafts)
        return max(1, min(self.max_num_seqs[tp], in_step, self.blocks[tp] // each))

    @property
    def short(self) -> int:
        """The short context, tokens."""
        # A quarter of a small model's, so that there is a longer one to compare with.
        return max(1, min(SHORT_CONTEXT, (self.max_model_len - self.room - 1) // 4))

    def prompts(self, tokens: int) -> list[int]:
        """Lengths of the prompts that make up a prefill of `tokens` tokens."""
        longest = max(1, min(LONGEST_PROMPT, self.max_model_len - 2))
        full, rest = divmod(tokens, longest)
        return [longest] * full + [rest] * bool(rest)

    def allows(self, point: StepPoint) -> bool:
        """Whether a replica can make such a step."""
        tp, prompts = point.layout.tp, self.prompts(point.prefill)
        contexts = [c + self.room_for(point.drafts) + 1 for c in point.contexts]
        blocks = sum(-(-n // self.block_size) for n in (*contexts, *(p + 1 for p in prompts)))
        return (
            0 < point.batch + len(prompts) <= self.max_num_seqs[tp]
            and point.batch * (1 + point.drafts) + point.prefill <= self.max_batch_tokens[tp]
            and max(contexts, default=0) <= self.max_model_len
            and blocks <= self.blocks[tp]
        )


@dataclass(frozen=True)
class StepPoint:
    """A step to be measured, in each of `busy` replicas at the same time.

    Attributes:
        batch: requests that decode, each with `context` tokens to begin with.
        longest: tokens of one of them, where it is longer than the others; else 0.
        prefill: prompt tokens computed beside them.
        k: draft length: draft tokens that the drafter is asked for, for each request.
        hits: whether each request has k drafts, as if the drafter had found them in the step
            before, and the step verifies them. Otherwise it verifies none.
    """

    layout: NamedLayout
    batch: int
    context: int
    busy: int
    longest: int = 0
    prefill: int = 0
    k: int = 0
    hits: bool = False

    @property
    def drafts(self) -> int:
        """Draft tokens of each request that a step verifies."""
        return self.k if self.hits else 0

    @property
    def contexts(self) -> list[int]:
        """Tokens of each context at the first step."""
        if not self.batch:
            return []
        return [*[self.context] * (self.batch - 1), max(self.context, self.longest)]

    def __str__(self) -> str:
        parts = [f"{self.batch} x {self.context} tokens"] if self.batch else []
        if self.longest > self.context:
            parts.append(f"one of {self.longest}")
        if self.prefill:
            parts.append(f"prefill of {self.prefill}")
        if self.k:
            parts.append(f"{self.k} drafts each" if self.hits else f"no drafts found of {self.k}")
        return f"{self.layout}, {self.busy} busy: {', '.join(parts)}"


@dataclass(frozen=True)
class SwitchPoint:
    """A switch to be measured, with `num_seqs` requests of `context` tokens."""

    source: NamedLayout
    target: NamedLayout
    num_seqs: int
    context: int

    def __str__(self) -> str:
        return f"switch {self.source} -> {self.target}: {self.num_seqs} x {self.context} tokens"


Point = StepPoint | SwitchPoint

POINTS: TypeAdapter[list[Point]] = TypeAdapter(list[Point])
"""Points as the plain values that travel between a front end and the engine core, and back."""
