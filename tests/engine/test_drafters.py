"""Drafters with weights, with Model Runner V1: at switches, changes of the draft length, updates.

A drafter that is the target itself tells whether its KV is whole: all that it drafts is accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pat_vllm
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.profile import Profile
from pat_vllm.scheduler.replica import Replica
from tests.engine.specs import EAGLE3, MTP, SELF_DRAFTS, V2_CHUNK
from tests.engine.test_weight_updates import PLAIN
from tests.engine.v2.batch import most_tokens, sizes_of, tour
from tests.support.drafters import DRAFTERS
from tests.support.engines import GATED_DELTA_NET, Job, Outcome, run, scheduler_of
from tests.support.models import phrase, random_model
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same
from tests.support.stock import stock_answers

pytestmark = pytest.mark.engine(SELF_DRAFTS, MTP, EAGLE3)

ENGINES = {
    "test_all_drafts_are_right_from_the_second_step_after_a_switch": [SELF_DRAFTS],
    "test_all_drafts_are_right_when_the_draft_length_has_been_0": [SELF_DRAFTS],
    "test_all_drafts_are_right_beside_a_request_near_the_longest_context": [SELF_DRAFTS],
    "test_drafts_are_right_after_an_update_of_both": [SELF_DRAFTS],
    "test_text_is_that_without_drafts": [MTP, EAGLE3],
    "test_drafts_are_planned_by_a_profile_with_their_passes": [MTP],
}
GREEDY = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}


def batch(model: str, tokens: int = 20, seed: int = 4) -> dict[str, Job]:
    """Greedy requests. The last comes late, and finds the first one's prompt in the cache."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 400) for _ in range(n)] for n in (2 * V2_CHUNK + 7, 5, 40)]
    if "repeating" in model or model in DRAFTERS:
        prompts[1] += phrase("repeating", 20, start=1)
    jobs = {
        f"r{i}": Job(prompt, GREEDY | {"max_tokens": tokens}) for i, prompt in enumerate(prompts)
    }
    jobs["late"] = Job(prompts[0] + [7, 8], GREEDY | {"max_tokens": tokens}, arrives=9)
    return jobs


def without_drafts(
    model: str, jobs: Mapping[str, Job] | None = None, seed: int = 4
) -> dict[str, Outcome]:
    """What stock vLLM gives for these requests, or the batch, without speculation."""
    jobs = batch(model, seed=seed) if jobs is None else jobs
    with pytest.MonkeyPatch.context() as patch:
        # This process has no interpreter of Triton's, and runs a stock engine's only rank.
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        plain = PLAIN if model.startswith(GATED_DELTA_NET) else {}
        # With prefix caching, vLLM's kernels for Mamba2 on CPU fail.
        no_cache: dict[str, Any] = {"enable_prefix_caching": False}
        whole = no_cache if model.startswith("nemotron") else {}
        return stock_answers(model, jobs, max_model_len=256, **plain, **whole)


class Verified:
    """Drafts that steps have verified and accepted, since the last `take`."""

    def __init__(self) -> None:
        self.drafted = self.accepted = 0

    def take(self) -> tuple[int, int]:
        counts = self.drafted, self.accepted
        self.drafted = self.accepted = 0
        return counts


@contextmanager
def verified() -> Iterator[Verified]:
    """Inside, the drafts of each step are counted."""
    counts, finish = Verified(), Replica.finish

    def finishing(replica: Replica, output: Any, *args: Any) -> Any:
        drafts = replica.in_flight[0].scheduled_spec_decode_tokens
        for name, tokens in drafts.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[name]]
            counts.drafted += len(tokens)
            counts.accepted += len(sampled) - 1
        return finish(replica, output, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "finish", finishing)
        yield counts


def take_tour(
    llm: Any, model: str, at_switch: Callable[[], object] = lambda: None, seed: int = 4
) -> dict[str, Outcome]:
    """Run the batch through every ordered pair of layouts."""
    go_home(llm)
    left, due = tour(sizes_of(llm)), 1

    def before_step(step: int) -> None:
        nonlocal due
        if left and most_tokens(llm) >= due:
            due += 6
            at_switch()
            assert pat_vllm.switch(llm, tp=left.pop(0))

    outcomes = run(llm, batch(model, seed=seed), before_step)
    assert not left, "the requests ended before the tour"
    switches = pat_vllm.report(llm).switches
    assert any(switch.migrated for switch in switches)
    return outcomes


def test_all_drafts_are_right_from_the_second_step_after_a_switch(llm: Any) -> None:
    counts: list[tuple[int, int]] = []
    with verified() as seen:
        outcomes = take_tour(llm, "qwen3", at_switch=lambda: counts.append(seen.take()))
        counts.append(seen.take())
    assert_same(outcomes, without_drafts("qwen3"), PLAIN_TOLERANCE)
    assert all(drafted == accepted for drafted, accepted in counts), counts
    assert all(drafted for drafted, _ in counts[2:]), counts
    assert not pat_vllm.report(llm).drafter_is_stale


def test_all_drafts_are_right_when_the_draft_length_has_been_0(llm: Any) -> None:
    """The drafter's pass was made in those steps, too. A switch comes among them."""
    lengths = {0: 2, 6: 0, 12: 2}
    counts: list[tuple[int, int]] = []

    def before_step(step: int) -> None:
        if step in lengths:
            counts.append(seen.take())
            pat_vllm.speculate(llm, lengths[step])
        if step in (9, 15):
            assert pat_vllm.switch(llm, tp=2 if step == 9 else 1)

    with verified() as seen:
        outcomes = run(llm, batch("qwen3"), before_step)
        counts.append(seen.take())
    assert_same(outcomes, without_drafts("qwen3"), PLAIN_TOLERANCE)
    assert all(drafted == accepted for drafted, accepted in counts), counts
    assert counts[1][0] and counts[3][0], counts


def test_all_drafts_are_right_beside_a_request_near_the_longest_context(llm: Any) -> None:
    """Its drafts, too, as far as there are tokens left; and those of the others when it is gone."""
    rng = random.Random(6)
    longest = llm.llm_engine.vllm_config.model_config.max_model_len
    jobs = batch("qwen3", tokens=50)
    prompt = [rng.randrange(3, 400) for _ in range(longest - 20)]
    jobs["longest"] = Job(prompt, GREEDY | {"max_tokens": 50})
    jobs["after"] = Job(prompt[:V2_CHUNK], GREEDY | {"max_tokens": 20}, arrives=16)
    expected = without_drafts("qwen3", jobs)
    assert len(expected["longest"].token_ids) == 20
    go_home(llm)
    with verified() as seen:
        outcomes = run(llm, jobs)
        drafted, accepted = seen.take()
    assert_same(outcomes, expected, PLAIN_TOLERANCE)
    assert drafted == accepted > 100, (drafted, accepted)


def load_into(worker: Any, path: str, drafter: bool) -> None:
    """Load weights as trainers do that know Model Runner V1's `drafter`."""
    from safetensors.torch import load_file

    runner = worker.model_runner
    model = runner.drafter.model if drafter else runner.model
    model.load_weights(load_file(Path(path) / "model.safetensors").items())


def test_drafts_are_right_after_an_update_of_both(llm: Any) -> None:
    """After one of the target alone they are not, and the report says why."""
    new, shares = "qwen3_updated", []
    try:
        for drafter in (False, True):
            assert pat_vllm.switch(llm, tp=2)
            llm.collective_rpc(load_into, args=(str(random_model(new)), drafter))
            with verified() as seen:
                outcomes = take_tour(llm, "qwen3")
                drafted, accepted = seen.take()
            assert_same(outcomes, without_drafts(new), PLAIN_TOLERANCE)
            assert pat_vllm.report(llm).drafter_is_stale == (not drafter)
            shares.append(accepted / drafted)
    finally:
        for drafter in (False, True):
            llm.collective_rpc(load_into, args=(str(random_model("qwen3")), drafter))
    assert shares[0] < 0.5 and shares[1] == 1, shares


def test_text_is_that_without_drafts(llm: Any, spec: EngineSpec) -> None:
    with verified() as seen:
        outcomes = take_tour(llm, spec.model)
        drafted, accepted = seen.take()
    assert_same(outcomes, without_drafts(spec.model), PLAIN_TOLERANCE)
    assert 0.1 * drafted < accepted < drafted, (drafted, accepted)


def test_drafts_are_planned_by_a_profile_with_their_passes(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures every layout with each length that tells; the policy tries more than one."""
    go_home(llm)
    (asked,) = llm.collective_rpc("pat_profile", kwargs={"seconds": 2.0})
    profile = Profile.model_validate(asked["profile"])
    assert profile.drafter_has_weights
    with_drafts = [step for step in profile.steps if step.k]
    assert {step.layout for step in with_drafts} == {*profile.layouts}
    assert all(step.drafts == step.k * step.batch for step in with_drafts)
    lengths = (0, 1, 2)
    policy = AdaptivePolicy(profile, bound=256, draft_lengths=lengths, timer=lambda: 0.0)
    monkeypatch.setattr(scheduler_of(llm).monitor, "policy", policy)
    scheduler_of(llm).controller._forced = False
    outcomes = run(llm, batch("mimo"))
    assert_same(outcomes, without_drafts("mimo"), PLAIN_TOLERANCE)
    report = pat_vllm.report(llm).predictor
    assert report is not None and report.plans and policy._acceptance is not None
    expected = policy._acceptance.expected()
    assert expected.tokens[-1] > expected.tokens[0] == 1, "what was accepted is learnt"
