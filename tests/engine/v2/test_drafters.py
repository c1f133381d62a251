"""Drafters with weights: at switches, changes of the draft length and updates.

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
from tests.engine.specs import EAGLE3, MTP, MTP_LINEAR, SELF_DRAFTS, V2_CHUNK
from tests.engine.test_weight_updates import PLAIN
from tests.engine.v2.batch import most_tokens, sizes_of, tour
from tests.support.drafters import DRAFTERS
from tests.support.engines import GATED_DELTA_NET, Job, Outcome, run, scheduler_of
from tests.support.models import phrase, random_model
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same
from tests.support.stock import stock_answers

pytestmark = pytest.mark.engine(SELF_DRAFTS, MTP, EAGLE3, MTP_LINEAR)

ENGINES = {
    "test_all_drafts_are_right_from_the_second_step_after_a_switch": [SELF_DRAFTS],
    "test_all_drafts_are_right_when_the_draft_length_has_been_0": [SELF_DRAFTS],
    "test_drafts_are_right_after_an_update_of_both": [SELF_DRAFTS],
    "test_text_is_that_without_drafts": [MTP, EAGLE3],
    "test_drafts_are_planned_by_a_profile_with_their_passes": [MTP],
    "test_earlier_responses_draft_where_more_of_them_is_accepted": [MTP],
    "test_linear_attention_goes_on_from_the_last_accepted_token": [MTP_LINEAR],
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


def test_earlier_responses_draft_where_more_of_them_is_accepted(llm: Any) -> None:
    """Of prompts that come again. It is so across switches, and with the same text."""
    shares = []
    for _ in range(2):
        with verified() as seen:
            outcomes = take_tour(llm, "mimo", seed=5)
            drafted, accepted = seen.take()
        assert_same(outcomes, without_drafts("mimo", seed=5), PLAIN_TOLERANCE)
        shares.append(accepted / drafted)
    assert shares[1] > shares[0] + 0.1, shares


def test_linear_attention_goes_on_from_the_last_accepted_token(llm: Any, spec: EngineSpec) -> None:
    """Switches at every second step: as requests come from one block of 64 tokens into the next,
    where a step verifies no drafts, and beside a request that is given up. A prompt is found in the
    cache, if there is one."""
    rng = random.Random(5)
    few = GREEDY | {"max_tokens": 40}
    lengths = (150, 33, 60, 97, 52, 56, 115)
    jobs = {f"r{n}": Job([rng.randrange(3, 400) for _ in range(n)], few) for n in lengths}
    jobs["late"] = Job([*jobs["r150"].prompt, 7, 8], few, arrives=45)
    given_up = Job([5] * 50, GREEDY | {"max_tokens": 100})
    drafts = {0: 2, 20: 0, 26: 2, 36: 1}
    before_switches: list[tuple[int, int]] = []
    seen: dict[str, Outcome] = {}

    def before_step(step: int) -> None:
        if step in drafts:
            pat_vllm.speculate(llm, drafts[step])
        if step == 17:
            llm.llm_engine.abort_request(["given up"])
        if step % 2:
            counts.take()
        elif step:
            before_switches.append(counts.take())
            assert pat_vllm.switch(llm, tp=1 + step // 2 % 2)

    go_home(llm)
    with verified() as counts:
        outcomes = run(llm, jobs | {"given up": given_up}, before_step, seen)
    outcomes.pop("given up", None)
    assert_same(outcomes, without_drafts(spec.model, jobs), PLAIN_TOLERANCE)
    cached = outcomes["late"].num_cached_tokens
    assert bool(cached) == spec.options.get("enable_prefix_caching", True)
    drafted, accepted = map(sum, zip(*before_switches, strict=True))
    assert 10 < accepted < drafted, before_switches
    assert sum(switch.migrated for switch in pat_vllm.report(llm).switches) > 20
