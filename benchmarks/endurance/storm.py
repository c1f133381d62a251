"""Batches of requests that come, go and are given up, under random switches and draft lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.models import phrase

MODEL = "repeating"
"""A tiny model (`tests/support/models.py`) whose text repeats itself: drafts are accepted."""
SPECULATIVE: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
DRAFT_LENGTHS = (0, 1, 2, 4)
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads of a tiny model only spin while they wait for each other.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # oneDNN keeps what it has compiled for 1,024 shapes, and a number of tokens is a shape: until
    # that is full, memory grows for minutes, which would hide what else does.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "LRU_CACHE_CAPACITY": "8",
    # Lets a function travel to the workers.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Beside what engines of all benchmarks get: there are more processes than cores."""

COUNTED = ("batches", "requests", "given up", "switches", "changes of the draft length")
"""What happens in a storm."""


@dataclass
class Storm:
    """Runs batches, and counts what happened.

    Attributes:
        llm: with PAT and, if it speculates, `SPECULATIVE`.
        sizes: tp of the layouts to switch between.
        speculates: whether to change the draft length, too.
        counts: what happened so far.
    """

    llm: Any
    rng: random.Random
    sizes: Sequence[int]
    speculates: bool
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    _unfinished: list[str] = field(default_factory=list)

    def run_batch(self) -> None:
        """One batch, until its last request has ended; the engine is idle then, and back.

        Raises:
            EngineDeadError: the engine died.
        """
        engine = self.llm.llm_engine
        waiting = self.rng.randint(4, 32)
        while waiting or engine.has_unfinished_requests():
            while waiting and (not self._unfinished or self.rng.random() < 0.6):
                self._add()
                waiting -= 1
            self._disturb()
            if engine.has_unfinished_requests():
                ended = {output.request_id for output in engine.step() if output.finished}
                self._unfinished = [name for name in self._unfinished if name not in ended]
        self.counts["batches"] += 1

    def _add(self) -> None:
        from vllm import SamplingParams

        self.counts["requests"] += 1
        name = f"storm-{self.counts['requests']}"
        start, length = self.rng.randrange(16), self.rng.randint(4, 120)
        self.llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": phrase(MODEL, length, start)},
            SamplingParams(
                max_tokens=self.rng.randint(1, 60),
                temperature=self.rng.choice((0.0, 1.0)),
                ignore_eos=True,
            ),
        )
        self._unfinished.append(name)

    def _disturb(self) -> None:
        import pat_vllm

        if self._unfinished and self.rng.random() < 0.03:
            name = self._unfinished.pop(self.rng.randrange(len(self._unfinished)))
            self.llm.llm_engine.abort_request([name])
            self.counts["given up"] += 1
        if self.rng.random() < 0.2:
            self.counts["switches"] += pat_vllm.switch(self.llm, tp=self.rng.choice(self.sizes))
        if self.speculates and self.rng.random() < 0.1:
            pat_vllm.speculate(self.llm, self.rng.choice(DRAFT_LENGTHS))
            self.counts["changes of the draft length"] += 1
