"""The load for which an engine chooses its layouts (`choice.py`). Pure but for a file it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pat_vllm.config import PATConfig
from pat_vllm.files.reading import FileError
from pat_vllm.modelled.shapes import drawn_lengths
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.state import LiveRequests
from pat_vllm.predictor.whole_batch import Batch, acceptance_of_each
from pat_vllm.start.buffers import EngineShape

_USUAL_SEQS = 256
"""The most requests that are expected for each rank; a larger `max_num_seqs` is vLLM's default on
large GPUs, and says little of the load."""
_MAX_TOKENS, _PROMPT_TOKENS = 16384, 256
"""Tokens of the longest response, and of each prompt, where nothing is known of them."""
_EXPECTED = 4096
"""Number of response lengths that are drawn from what an engine has learnt."""


@dataclass(frozen=True)
class Load:
    """A batch that is expected.

    Attributes:
        responses: number of responses, of all ranks together.
        lengths: tokens of some or all of the responses; `batch` repeats them for the rest.
        num_prompt_tokens: tokens of each prompt.
        acceptance: mean probability that a draft token is accepted if those before it were.
        at_most: whether there may be fewer responses.
    """

    responses: int
    lengths: Sequence[int]
    num_prompt_tokens: int = _PROMPT_TOKENS
    acceptance: float = 0.5
    at_most: bool = False

    @classmethod
    def usual(cls, max_num_seqs: int, ranks: int, max_model_len: int) -> Load:
        """The load where nothing is known: `max_num_seqs` requests for each rank, at most
        `_USUAL_SEQS`, with response lengths as DeepScaleR has them (`modelled/shapes.py`)."""
        responses = ranks * min(max_num_seqs, _USUAL_SEQS)
        most = max(1, min(_MAX_TOKENS, max_model_len - _PROMPT_TOKENS))
        return cls(
            responses, drawn_lengths("deepscaler", responses, most, 0).tolist(), at_most=True
        )

    def smaller(self) -> list[Load]:
        """Loads of a half, a quarter, an eighth and a sixteenth of the responses; none, unless this
        load is the most that may come (`at_most`)."""
        halves = (self.responses >> power for power in range(1, 5)) if self.at_most else ()
        return [replace(self, responses=half) for half in halves if half]

    @property
    def batch(self) -> Batch:
        """The load as a batch of the planner's."""
        return Batch(
            np.full(self.responses, self.num_prompt_tokens),
            np.resize(np.asarray(self.lengths, np.int64), self.responses),
            acceptance_of_each(self.acceptance, self.responses, 0),
        )

    @property
    def most_tokens(self) -> int:
        """Tokens of KV that all requests hold together when they hold the most, if none waits and
        all are equally fast."""
        lengths = np.sort(self.batch.lengths)
        live = np.arange(self.responses, 0, -1)  # when the i-th shortest is about to end
        return int((live * (self.num_prompt_tokens + lengths)).max(initial=0))


def learnt_lengths(path: Path) -> tuple[int, ...]:
    """Response lengths in tokens, drawn from what an engine has kept in a file; none if it has seen
    no response.

    Raises:
        ValueError: the file cannot be read.
    """
    model, _ = learned_state.load(path)
    if not model.responses:
        return ()
    fresh = LiveRequests.fresh(np.ones(1, np.int64), model.bound)
    return tuple(model.sample(fresh, _EXPECTED)[0].tolist())


def expected_load(pat: PATConfig, engine: EngineShape, ranks: int) -> Load:
    """The load to expect of an engine: as many requests as `Load.usual`, with the lengths that its
    `state_dir` tells. Without such a file, or with one that cannot be read (the engine core sets it
    aside), the lengths are the usual ones, too."""
    load = Load.usual(engine.max_num_seqs, ranks, engine.max_model_len)
    if pat.state_dir is not None and (kept := Path(pat.state_dir) / learned_state.NAME).exists():
        with contextlib.suppress(FileError):
            if lengths := learnt_lengths(kept):
                return replace(load, lengths=lengths)
    return load
