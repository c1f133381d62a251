"""What PAT changes in vLLM's runner, on one that is played."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from pat_vllm.patches.drafts import prepare_drafter, skip_empty_drafts
from tests.speculation.steps import LONGEST, MOST, SHORTEST, SPECULATIVE
from tests.support.mutation import mutated
from tests.support.ngram import propose


class Runner:
    """Model Runner V1 as far as it asks whether it speculates."""

    def __init__(self, method: str = "ngram") -> None:
        self.speculative_config: Any = SimpleNamespace(method=method)
        self.drafter = SimpleNamespace(k=MOST, propose=lambda *args: None)
        self.seen: list[tuple[str, bool]] = []
        self.fails = False

    def execute_model(self, step: SchedulerOutput) -> None:
        self.seen.append(("execute", self.speculative_config is not None))

    def sample_tokens(self, grammars: Any) -> None:
        self.seen.append(("sample", self.speculative_config is not None))
        if self.fails:
            raise RuntimeError("a sampler's mistake")

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return False


def a_step(k: int, drafts: int = 0, tokens: int = 1) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.total_num_scheduled_tokens = tokens
    step.num_spec_tokens_to_schedule = k
    step.scheduled_spec_decode_tokens = {"a": [7] * drafts} if drafts else {}
    return step


def patched(method: str = "ngram") -> Any:
    runner: Any = Runner(method)
    prepare_drafter(runner)
    return runner


def speculates(runner: Any, step: SchedulerOutput) -> bool:
    """Whether a step asks for the drafter or the rejection sampler, in both its halves."""
    runner.seen.clear()
    runner.execute_model(step)
    runner.sample_tokens(None)
    assert runner.speculative_config is not None
    (_, first), (_, second) = runner.seen
    assert first == second
    return first


def check_empty_drafts() -> None:
    """Where nothing is verified nor drafted, and only there."""
    runner = patched()
    assert not speculates(runner, a_step(0))
    assert speculates(runner, a_step(2))
    assert speculates(runner, a_step(0, drafts=2))
    assert speculates(runner, a_step(2, drafts=2))
    assert not speculates(runner, a_step(0))
    runner.execute_model(a_step(0, tokens=0))  # which is not followed by sampling
    assert runner.speculative_config is not None
    runner.fails = True
    with pytest.raises(RuntimeError, match="a sampler's mistake"):
        speculates(runner, a_step(0))
    assert runner.speculative_config is not None


def test_steps_without_drafts_are_as_without_a_drafter() -> None:
    check_empty_drafts()


@pytest.mark.parametrize(
    "changes",
    [
        {"config if drafts or not samples else None": "config"},
        {"config if drafts or not samples else None": "config if drafts else None"},
        {"step.scheduled_spec_decode_tokens or step.num": "step.num"},
        {"                    runner.speculative_config = config\n": "                    pass\n"},
    ],
    ids=["0 drafts", "stays so after an empty step", "drafts are not verified", "stays so"],
)
def test_wrong_steps_are_seen(changes: dict[str, str]) -> None:
    with mutated(skip_empty_drafts, changes), pytest.raises(AssertionError):
        check_empty_drafts()


def test_a_drafter_that_keeps_tokens_always_runs() -> None:
    assert speculates(patched("ngram_gpu"), a_step(0))


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_drafts_near_the_longest_context(method: str) -> None:
    runner = patched(method)
    assert runner._input_fits_in_drafter("some") == (method == "ngram")
    assert not runner._input_fits_in_drafter(None)


def test_without_speculation_nothing_is_changed() -> None:
    runner: Any = Runner()
    runner.speculative_config = None
    prepare_drafter(runner)
    assert not vars(runner).keys() & {"execute_model", "sample_tokens", "_input_fits_in_drafter"}


@pytest.mark.slow
@pytest.mark.nightly
def test_vllms_drafter_ends_at_the_longest_context() -> None:
    """And drafts what the checks of steps expect.

    In a process of its own: no engine starts in one where numba has threads.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(compare_with_vllms_drafter).result(timeout=200) > 300


def compare_with_vllms_drafter() -> int:
    """How many tokens both drafters have drafted, alike."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    longest = 40
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(**SPECULATIVE),
        model_config=SimpleNamespace(max_model_len=longest),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    drafter = NgramProposer(config)
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(300):
        tokens = rng.integers(0, 4, size=(2, longest), dtype=np.int32)
        lengths = rng.integers(1, longest + 1, size=2, dtype=np.int32)
        k = int(rng.integers(1, MOST + 1))
        drafts = drafter.propose(k, [[1], [1]], lengths, tokens)
        for row, length, draft in zip(tokens, lengths, drafts, strict=True):
            expected = propose(row[:length].tolist(), SHORTEST, LONGEST, min(k, longest - length))
            assert draft == expected
            found += len(draft)
    return found
