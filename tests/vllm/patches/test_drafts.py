"""What PAT changes in vLLM's drafters and runners, on a runner that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample import rejection_sampler

from pat_vllm.patches import drafts
from pat_vllm.patches.drafts import prepare_drafter

MOST = 4


class Runner:
    """Model Runner V1 as far as it asks whether it speculates."""

    def __init__(self, method: str = "ngram") -> None:
        self.speculative_config: Any = SimpleNamespace(method=method)
        self.drafter = SimpleNamespace(k=MOST, propose=self._propose)
        self.seen: list[tuple[str, bool]] = []
        self.fails = False

    def _propose(self, k: int, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert k == MOST, "the drafter fails at other lengths"
        return torch.arange(2 * MOST).view(2, MOST), torch.tensor([1, MOST])

    def execute_model(self, step: SchedulerOutput) -> None:
        self.seen.append(("execute", self.speculative_config is not None))

    def sample_tokens(self, grammars: Any) -> None:
        self.seen.append(("sample", self.speculative_config is not None))
        if self.fails:
            raise RuntimeError("a sampler's mistake")

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> None:
        raise AssertionError("no step here gets so far")

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
    for _ in range(2):
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


def test_steps_without_drafts_are_as_without_a_drafter() -> None:
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


def test_a_drafter_that_keeps_tokens_always_runs_and_with_its_own_length() -> None:
    runner = patched("ngram_gpu")
    assert speculates(runner, a_step(0))
    for length, tokens, counts in (
        (MOST, [[0, 1, 2, 3], [4, 5, 6, 7]], [1, 4]),
        (2, [[0, 1], [4, 5]], [1, 2]),
        (0, [[], []], [0, 0]),
    ):
        drafted, num_valid = runner.drafter.propose(length)
        assert (drafted.tolist(), num_valid.tolist()) == (tokens, counts)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_drafts_near_the_longest_context(method: str) -> None:
    runner = patched(method)
    assert runner._input_fits_in_drafter("some") == (method == "ngram")
    assert not runner._input_fits_in_drafter(None)


def test_drafts_are_verified_by_the_parameters_of_their_requests() -> None:
    """vLLM's own C++ for CPU leaves them unwritten, and fails where there are no drafts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
            patch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
        for _ in range(2):
            drafts.verify_sampled_drafts()
        expand = rejection_sampler.expand_batch_to_tokens
        counts = torch.tensor([2, 2, 5], dtype=torch.int32)
        temperature = expand(torch.tensor([0.5, 9.0, 0.0]), counts, 5, replace_to=1)
        assert temperature.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
        top_k = expand(torch.tensor([7, 8, 9], dtype=torch.int32), counts, 5)
        assert top_k.dtype == torch.int32
        assert top_k.tolist() == [7, 7, 9, 9, 9]
        parameters: Any = SimpleNamespace(
            all_greedy=False, temperature=torch.ones(1), top_k=torch.ones(1), top_p=None
        )
        none = torch.zeros(1, dtype=torch.int32)
        constrained = rejection_sampler.apply_sampling_constraints(
            torch.zeros(0, 16), none, parameters
        )
        assert constrained.shape == (0, 16)
