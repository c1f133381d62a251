"""The synthetic steps of a point: what vLLM's scheduler would send, whatever is accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pat_vllm.profiling.grid import StepPoint
from pat_vllm.profiling.synthetic_steps import SyntheticSteps
from tests.unit.profiling.test_grid import LIMITS, ONE


def output_of(step: Any, accepted: list[int]) -> Any:
    """What a runner returns for a step: each request accepts so many of its drafts at most."""
    names = list(step.num_scheduled_tokens)
    drafts = step.scheduled_spec_decode_tokens
    sampled = [
        [7] * (1 + min(count, len(drafts.get(name, ()))))
        for name, count in zip(names, accepted, strict=True)
    ]
    return SimpleNamespace(req_ids=names, sampled_token_ids=sampled)


def drive(stream: SyntheticSteps, point: StepPoint, depth: int, accepted: list[int]) -> int:
    """Run a stream until it is full, as a runner that accepts so many; returns the steps."""
    tokens: dict[str, int] = {}
    room: dict[str, int] = {}
    flying: list[Any] = []
    steps = 0
    while True:
        while not stream.full and len(flying) < depth:
            step = stream.next()
            steps += 1
            assert step.num_spec_tokens_to_schedule == point.k
            for new in step.scheduled_new_reqs:
                tokens[new.req_id] = len(new.prompt_token_ids)
                room[new.req_id] = LIMITS.kinds[0].block_size * len(new.block_ids[0])
            cached = step.scheduled_cached_reqs
            for name, computed, outputs in zip(
                cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
            ):
                drafts = step.scheduled_spec_decode_tokens.get(name, [])
                assert len(drafts) == point.drafts
                assert step.num_scheduled_tokens[name] == 1 + len(drafts)
                # What is in flight counts as accepted.
                ahead = sum(earlier.num_scheduled_tokens[name] for earlier in flying)
                assert computed == tokens[name] - 1 + ahead
                assert computed + 1 + len(drafts) <= room[name]
                assert outputs == computed + 1 - 20
            flying.append(step)
        if not flying:
            return steps
        output = output_of(flying.pop(0), accepted)
        stream.finished(output)
        for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            tokens[name] += len(sampled)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("k", "hits"), [(0, False), (4, True), (4, False)])
@pytest.mark.parametrize("accepted", [[7, 7, 7], [0, 2, 5]], ids=str)
def test_what_is_accepted_counts_as_with_vllm(
    depth: int, k: int, hits: bool, accepted: list[int]
) -> None:
    point = StepPoint(ONE, 3, 20, 1, k=k, hits=hits)
    stream = SyntheticSteps(point, LIMITS, "r", False, 1000)
    steps = drive(stream, point, depth, accepted)
    assert steps >= (5 if depth == 1 else 3)
    assert stream.sizes[0] == (60, 20)
    assert len(stream.sizes) == steps
    if not point.drafts:
        assert stream.sizes == [(3 * (20 + n), 20 + n) for n in range(steps)]
        assert steps == LIMITS.room_for(0) + 1


def test_contexts_repeat_themselves_only_where_drafts_are_found() -> None:
    def contexts(**values: Any) -> list[list[int]]:
        step = SyntheticSteps(StepPoint(ONE, 2, 40, 1, **values), LIMITS, "r", False, 1000).next()
        prompts = [list(new.prompt_token_ids or ()) for new in step.scheduled_new_reqs]
        assert [len(prompt) for prompt in prompts] == [40, 40]
        return prompts

    assert contexts() == contexts(k=4, hits=True) == [[1] * 40] * 2
    for context in contexts(k=4):
        assert len({*context}) == 40
