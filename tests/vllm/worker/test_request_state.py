"""What Model Runner V1 keeps of a request reaches another runner; one that is left has nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from pat_vllm.worker.request_state import V1RequestStateTransfer

CPU = torch.device("cpu")
THINK, END = [1, 2], [7, 8, 9, 10]
BUDGET = 2
TOKENS = 10


def runner() -> Any:
    """As far as it is asked for requests. Its first step with requests tells the processors."""
    reasoning: Any = SimpleNamespace(
        reasoning_start_token_ids=THINK, reasoning_end_token_ids=END, enabled=True
    )
    holder = ThinkingBudgetStateHolder(reasoning, 4, 0, CPU, False)
    batch = SimpleNamespace(
        logitsprocs=LogitsProcessors(),
        thinking_budget_state_holder=holder,
        max_num_reqs=4,
        req_id_to_index={},
        prev_sampled_token_ids=torch.zeros(1),
        prev_req_id_to_index={"a": 0},
        sampled_token_ids_cpu=torch.zeros(1),
        async_copy_ready_event=object(),
    )

    def execute_model(step: Any) -> None:
        for request_id in step.finished_req_ids:
            made.requests.pop(request_id)

    made = SimpleNamespace(
        requests={},
        input_batch=batch,
        num_prompt_logprobs={},
        device=CPU,
        execute_model=execute_model,
    )
    return made


def state(**fields: Any) -> CachedRequestState:
    params = SamplingParams(temperature=0.9, seed=3, thinking_token_budget=BUDGET)
    given: dict[str, Any] = dict(
        req_id="a",
        prompt_token_ids=[5, *THINK],
        mm_features=[],
        sampling_params=params,
        generator=torch.Generator().manual_seed(3),
        block_ids=([4, 5],),
        num_computed_tokens=9,
        output_token_ids=[20, 21],
        prev_num_draft_len=2,
    )
    return CachedRequestState(**given | fields)


def test_each_field_is_carried_or_begins_anew() -> None:
    """A field that a later vLLM adds is carried, too."""
    transfer, source, target = V1RequestStateTransfer(), runner(), runner()
    source.requests["a"] = before = state(
        mrope_positions=torch.arange(6),
        mrope_position_delta=4,
        in_progress_prompt_logprobs_cpu="p",
        prompt_embeds="eee",
    )
    source.num_prompt_logprobs["a"] = 3
    assert before.generator is not None
    torch.rand(5, generator=before.generator)
    transfer.restore(target, transfer.take(source, ["a", "of another replica"]))
    assert target.requests.keys() == {"a"} and target.num_prompt_logprobs == {"a": 3}
    after = target.requests["a"]
    anew = {"block_ids": (), "num_computed_tokens": 0, "prev_num_draft_len": 0}
    for name, value in vars(before).items():
        if name == "generator":
            assert torch.equal(value.get_state(), after.generator.get_state())
        elif name != "mrope_positions":
            assert getattr(after, name) == anew.get(name, value), name
    assert torch.equal(after.mrope_positions, torch.arange(6))


def test_a_runner_that_is_left_knows_nothing() -> None:
    transfer, left = V1RequestStateTransfer(), runner()
    transfer.watch(left)
    left.requests["a"] = state()
    transfer.restore(left, {"a": transfer.take(left, ["a"])["a"]})
    transfer.clear(left)
    batch = left.input_batch
    assert not left.requests
    assert batch.prev_sampled_token_ids is batch.prev_req_id_to_index is None
    assert batch.sampled_token_ids_cpu is batch.async_copy_ready_event is None
    assert transfer.take(left, ["a"]) == {}


def added(made: Any, row: int) -> BatchUpdate:
    request = made.requests["a"]
    fields = row, request.sampling_params, request.prompt_token_ids, request.output_token_ids
    return BatchUpdate(4, [], [fields], [])


def generate(switch_at: int | None) -> list[int]:
    """Tokens of a request that thinks, with two switches at once before a step."""
    transfer = V1RequestStateTransfer()
    here, *others = runners = [runner() for _ in range(3)]
    for each in runners:
        transfer.watch(each)
    here.requests["a"] = state(output_token_ids=[])
    here.input_batch.thinking_budget_state_holder.sync_batch(added(here, 0))
    here.input_batch.req_id_to_index["a"] = 0
    for step in range(TOKENS):
        if step == switch_at:
            for there in others:
                transfer.restore(there, transfer.take(here, ["a"]))
                here = there
            here.input_batch.thinking_budget_state_holder.sync_batch(added(here, 2))
            here.input_batch.req_id_to_index["a"] = 2
        request, row = here.requests["a"], here.input_batch.req_id_to_index["a"]
        holder = here.input_batch.thinking_budget_state_holder
        holder.update_state([request.output_token_ids if r == row else [] for r in range(4)], None)
        logits = holder.apply_to_logits(torch.zeros(4, 32), False, None)
        forced = int(logits[row].argmax()) if logits[row].any() else 20
        request.output_token_ids.append(forced)
    tokens: list[int] = here.requests["a"].output_token_ids
    return tokens


@pytest.mark.parametrize("switch_at", range(1, TOKENS))
def test_the_phrase_that_ends_thinking_comes_whole(switch_at: int) -> None:
    """Wherever in it a switch comes, and even if another one follows before the next step."""
    expected = generate(None)
    start = expected.index(END[0])
    assert expected[start : start + len(END)] == END and expected.count(20) == TOKENS - len(END)
    assert generate(switch_at) == expected
