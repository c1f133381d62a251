"""Linear attention: a request has one state, which a switch carries whole.

In float32, by plain torch or of Mamba2 by vLLM's kernels, to the tolerances of other models; in 16
bits by vLLM's kernels: states are those of the source, byte for byte, and log-probabilities are
apart as stock vLLM's are.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import pat_vllm
from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import Device
from pat_vllm.models.kinds import num_blocks
from pat_vllm.start.memory_estimate import estimate
from tests.engine.specs import (
    IN_16_BITS,
    LINEAR,
    LINEAR_CACHED,
    LINEAR_PACKED,
    LINEAR_TEXT,
    MAMBA,
    MAMBA_CACHED,
    WITHOUT_CACHE,
)
from tests.engine.test_memory import arithmetic_of
from tests.engine.test_switch import (  # noqa: F401
    at_steps,
    batch,
    between_turns,
    case,
    switches_since,
    test_every_ordered_pair_of_layouts,
    test_null_blocks_are_clear_after_a_switch,
    test_recomputing_gives_the_same,
    test_requests_stay_while_the_engine_sleeps,
    test_single_layouts_agree_and_differ_by_request,
    test_the_layouts_take_the_memory_of_one,
    test_what_moves_is_what_requests_hold,
)
from tests.engine.test_weight_updates import (  # noqa: F401
    PLAIN,
    test_an_update_reaches_every_layout,
    updated,
)
from tests.support.engines import Job, Outcome, run, scheduler_of
from tests.support.pool import EngineSpec, go_home
from tests.support.same import assert_same
from tests.support.stock import stock_answers

pytestmark = pytest.mark.engine(LINEAR)
ENGINES = {
    "test_every_ordered_pair_of_layouts": [LINEAR, LINEAR_TEXT, MAMBA],
    "test_a_group_is_a_stock_engine": [LINEAR, MAMBA],
    "test_an_update_reaches_every_layout": [LINEAR, MAMBA],
    "test_null_blocks_are_clear_after_a_switch": [LINEAR, MAMBA],
    "test_what_moves_is_what_requests_hold": [LINEAR, MAMBA],
    "test_the_layouts_take_the_memory_of_one": [LINEAR, MAMBA],
    "test_states_are_the_sources_byte_for_byte": [LINEAR_PACKED],
    "test_log_probabilities_are_as_far_apart_as_stock_vllms": [LINEAR_PACKED],
    "test_prompts_in_chunks_across_blocks": [LINEAR_CACHED, MAMBA_CACHED],
    "test_the_next_turn_finds_its_state_after_a_switch": [LINEAR_CACHED, MAMBA_CACHED],
    "test_the_pools_hold_what_is_estimated": [LINEAR_CACHED, MAMBA_CACHED],
}


def greedy(seed: int, requests: int, prompts: tuple[int, int], tokens: int) -> dict[str, Job]:
    rng = random.Random(seed)
    sampling = {"max_tokens": tokens, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    return {
        f"g{i}": Job([rng.randrange(3, 400) for _ in range(rng.randint(*prompts))], sampling)
        for i in range(requests)
    }


def test_a_group_is_a_stock_engine(llm: Any, spec: EngineSpec) -> None:
    """With plain weights on both sides."""
    stock = stock_answers(spec.model, batch(), ranks=2, **PLAIN, **WITHOUT_CACHE)
    assert_same(run(llm, batch(), at_steps(llm, {0: 2})), stock)


def test_preempted_requests_begin_anew(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the pools hold, with switches in between, and what is preempted is computed."""
    jobs = greedy(1, 26, (90, 110), 130)
    expected: dict[str, Outcome] = {}
    for part in range(3):
        of_part = dict(itertools.islice(jobs.items(), part, None, 3))
        expected |= run(llm, of_part, at_steps(llm, {0: 2}))
        go_home(llm)
    preempted: list[str] = []

    def before_step(step: int) -> None:
        at_steps(llm, {0: 1, 60: 2, 100: 1})(step)
        for replica in scheduler_of(llm).replica_set.replicas:
            own = replica.scheduler
            if "_preempt_request" not in vars(own):
                preempt = own._preempt_request

                def counted(request: Any, *args: Any, preempt: Any = preempt, **more: Any) -> None:
                    preempted.append(request.request_id)
                    preempt(request, *args, **more)

                own._preempt_request = counted

    count = len(pat_vllm.report(llm).switches)
    assert_same(run(llm, jobs, before_step), expected)
    assert preempted
    assert sum(bool(switch.num_seqs) for switch in switches_since(llm, count)) == 2


# -------------------------------------------------------------------- with prefix caching


def test_prompts_in_chunks_across_blocks(llm: Any) -> None:
    """Every ordered pair, at steps of prompts and of decoding; states of whole blocks move."""
    jobs = greedy(2, 6, (40, 260), 90)
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
    assert llm.llm_engine.vllm_config.cache_config.block_size == 64
    static = {}
    for tp in sizes:
        static[tp] = run(llm, jobs, at_steps(llm, {0: tp}))
        go_home(llm)
    for (source, target), at in itertools.product(itertools.permutations(sizes, 2), (1, 2, 20, 60)):
        count = len(pat_vllm.report(llm).switches)
        outcomes = run(llm, jobs, at_steps(llm, {0: source, at: target}))
        (switch,) = [s for s in switches_since(llm, count) if s.num_seqs]
        assert switch.recomputed == 0 or at < 3, "prompts that wait are computed there"
        assert_same(outcomes, static[target])
        go_home(llm)


def test_the_next_turn_finds_its_state_after_a_switch(llm: Any) -> None:
    """As many cached tokens as without a switch, and what is generated from them."""
    # Long, since a replica may make many steps beside a slow one.
    anchor = Job([5, 6, 7], {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True})

    def both_turns(source: int, target: int) -> dict[str, Outcome]:
        first = greedy(3, 4, (70, 150), 30)

        def again(name: str, job: Job) -> Job:
            response = static_first[name].token_ids
            return Job([*job.prompt, *response, 7, 8, 9], job.sampling)

        static_first = firsts.get(source) or run(llm, first, at_steps(llm, {0: source}))
        firsts[source] = static_first
        go_home(llm)
        later = {f"again {name}": again(name, job) for name, job in first.items()}
        between = between_turns(llm, source, target, later)
        outcomes = run(llm, first | {"anchor": anchor}, before_step=between)
        del outcomes["anchor"]
        go_home(llm)
        return outcomes

    firsts: dict[int, dict[str, Outcome]] = {}
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
    for source, target in itertools.permutations(sizes, 2):
        expected, outcomes = both_turns(source, source), both_turns(source, target)
        assert_same(outcomes, expected)
        cached, without = (
            {name: outcome.num_cached_tokens for name, outcome in ones.items()}
            for ones in (outcomes, expected)
        )
        assert cached == without and sum(count or 0 for count in cached.values()) >= 4 * 64


def test_the_pools_hold_what_is_estimated(llm: Any) -> None:
    """Of the longest contexts, in every layout."""
    model, engine = arithmetic_of(llm)
    estimated = estimate(model, engine, Device(0)).kv_tokens
    context = engine.max_model_len
    for layout in engine.layouts:
        assert pat_vllm.switch(llm, tp=layout.tp)
        for replica in scheduler_of(llm).replica_set.replicas:
            pool = replica.scheduler.kv_cache_manager.block_pool
            blocks = num_blocks(replica.kinds, context, room=engine.block_size)
            fits = pool.num_gpu_blocks / blocks * context
            assert estimated[layout.tp] == pytest.approx(fits, rel=0.02)


# -------------------------------------------------------------------- by vLLM's kernels


Place = tuple[int, list[int]]
"""The replica of a request, and the block of its state in each group."""


def states_on(worker: Any, layout: Layout, places: Mapping[str, Place]) -> dict[str, list[Any]]:
    """Of the requests of this rank's replica, each layer's states."""
    runtime = worker._runtimes[layout]
    layers = runtime.config.compilation_config.static_forward_context
    return {
        request_id: [
            tuple(state[blocks[group]].clone() for state in layers[name].kv_cache)
            for group, kv_group in enumerate(runtime.kv_cache_config.kv_cache_groups)
            for name in kv_group.layer_names
            if "linear_attn" in name
        ]
        for request_id, (replica, blocks) in places.items()
        if replica == layout.replica_of(worker.rank)
    }


def whole_states(llm: Any) -> dict[str, list[torch.Tensor]]:
    """The states of an idle engine's requests, of all heads, as bytes; by the test's names."""
    layout, places = pat_vllm.report(llm).layout, {}
    for replica in scheduler_of(llm).replica_set.replicas:
        for request_id, request in replica.scheduler.requests.items():
            ids = replica.scheduler.kv_cache_manager.get_block_ids(request_id)
            held = [kind.held(request.num_computed_tokens).stop - 1 for kind in replica.kinds]
            blocks = [of_group[last] for of_group, last in zip(ids, held, strict=True)]
            places[request_id] = replica.index, blocks
    ranks = llm.collective_rpc(states_on, args=(layout, places))
    states = {}
    for request_id, (replica, _) in places.items():
        of_group = [ranks[rank][request_id] for rank in layout.ranks_of(replica)]
        states[request_id.partition("-")[0]] = [
            whole.contiguous().view(torch.int8)
            for layer in zip(*of_group, strict=True)
            for whole in joined(layer)
        ]
    return states


def joined(shards: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> tuple[torch.Tensor, ...]:
    """The convolution's rows of 4 key heads, 4 of queries and 8 value heads of 64; the matrices."""
    convs, matrices = zip(*shards, strict=True)
    sizes = [heads * 64 // len(shards) for heads in (4, 4, 8)]
    parts = zip(*(conv.split(sizes, dim=-1) for conv in convs), strict=True)
    return torch.cat([piece for part in parts for piece in part], dim=-1), torch.cat(matrices)


def test_states_are_the_sources_byte_for_byte(llm: Any) -> None:
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
    jobs = greedy(4, 6, (3, 200), 40)
    seen: list[dict[str, list[torch.Tensor]]] = []
    for source, target in itertools.permutations(sizes, 2):
        seen.clear()

        def before_step(step: int, source: int = source, target: int = target) -> None:
            at_steps(llm, {0: source})(step)
            if step == 12:
                seen.append(whole_states(llm))
                assert pat_vllm.switch(llm, tp=target)
                seen.append(whole_states(llm))

        run(llm, jobs, before_step)
        before, after = seen
        assert before.keys() == after.keys() == jobs.keys()
        for name, states in before.items():
            assert len(states) == 2 * 4 and all(state.any() for state in states)
            assert all(map(torch.equal, states, after[name])), name
        different = {state.numpy().tobytes() for states in before.values() for state in states}
        # But for first layers' convolutions, which see no more than their last tokens.
        assert len(different) >= len(jobs) * 7, "each has states of its own"


def test_log_probabilities_are_as_far_apart_as_stock_vllms(llm: Any) -> None:
    """Of tokens on which stock vLLM's tp=1 and tp=2 agree, in every ordered pair of layouts."""
    jobs = greedy(5, 8, (20, 200), 60)
    ones, twos = (
        stock_answers("repeating_next", jobs, ranks=ranks, **IN_16_BITS) for ranks in (1, 2)
    )
    agreed = {name: alike(answer.token_ids, twos[name].token_ids) for name, answer in ones.items()}
    spread = max(
        abs(a - b)
        for name, count in agreed.items()
        for a, b in zip(ones[name].logprobs[:count], twos[name].logprobs[:count], strict=True)
    )
    assert 0 < spread < 1 and sum(agreed.values()) > 200, (spread, agreed)
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
    for source, target in itertools.permutations(sizes, 2):
        outcomes = run(llm, jobs, at_steps(llm, {0: source, 9: target}))
        apart, after = 0.0, 0
        for name, outcome in outcomes.items():
            count = min(agreed[name], alike(outcome.token_ids, ones[name].token_ids))
            after += max(0, count - 9)
            of_stock = zip(ones[name].logprobs, twos[name].logprobs, strict=True)
            for own, others in itertools.islice(
                zip(outcome.logprobs, of_stock, strict=True), count
            ):
                apart = max(apart, min(abs(own - other) for other in others))
        print(f"{source} to {target}: {apart:.3f} apart, stock vLLM {spread:.3f}; {after} tokens")
        assert apart <= 2 * spread and after > 100


def alike(tokens: list[int], other: list[int]) -> int:
    """How many tokens are the same from the first on."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False))
    return sum(1 for _ in same)
