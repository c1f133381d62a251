"""A wider layout runs more requests: as schedulers admit them, and as workers compute them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.structured_output import StructuredOutputManager

import pat_vllm
from benchmarks.without_workers import answer, engine_config, request
from pat_vllm.executor.executor import StepResult
from pat_vllm.patches.schedulers import make_room_for_grammars
from pat_vllm.scheduler.replica_set import ReplicaSet
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.worker import layout_config
from tests.engines import Job, Outcome, engine, run, scheduler_of
from tests.support.mutation import mutated

RANKS = 8
SEQS = 4
"""`max_num_seqs` of these engines."""

# -------------------------------------------------------------------- schedulers


def scheduler_in(tp: int, **options: Any) -> Any:
    """A scheduler of eight ranks, without workers, in the layout of this tp."""
    config, stock = engine_config(tp, num_blocks=200)
    config.scheduler_config.max_num_seqs = SEQS
    config.additional_config["pat"].update(kv_transfer="migrate", **options)
    return PATScheduler(vllm_config=config, **stock)


def step(scheduler: Any) -> None:
    output = scheduler.schedule()
    results = [StepResult(i, answer(one), 0.01) for i, one in output.steps.items()]
    scheduler.update_from_output(output, results)


def counts(scheduler: Any) -> tuple[int, int]:
    """Requests that run and that wait, after a step."""
    step(scheduler)
    running, waiting = scheduler.get_request_counts()
    return running, waiting


def add(scheduler: Any, number: int) -> None:
    for index in range(number):
        scheduler.add_request(request(f"r{index}", index))


def check_every_layout_runs_the_same_number() -> None:
    for tp in (1, 2, 4, 8):
        scheduler = scheduler_in(tp)
        add(scheduler, RANKS * SEQS + 3)
        assert counts(scheduler) == (RANKS * SEQS, 3)


def check_a_switch_leaves_none_queued() -> None:
    """That ran before it, in whichever direction it goes."""
    for path in ((1, 2, 4, 8, 1), (8, 1, 4, 2)):
        scheduler = scheduler_in(path[0])
        add(scheduler, RANKS * SEQS)
        assert counts(scheduler) == (RANKS * SEQS, 0)
        for tp in path[1:]:
            assert scheduler.controller.request(tp) is True
            assert counts(scheduler) == (RANKS * SEQS, 0)


CHECKS: list[Callable[[], None]] = [
    check_every_layout_runs_the_same_number,
    check_a_switch_leaves_none_queued,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_schedulers_with_the_engines_limit_are_seen(check: Callable[[], None]) -> None:
    changes = {"config.max_num_seqs = limits.max_num_seqs": "pass"}
    with mutated(layout_config._scheduler_config, changes), pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_limits_may_hold_for_each_replica(tp: int) -> None:
    scheduler = scheduler_in(tp, limits_per="replica")
    add(scheduler, RANKS * SEQS + 3)
    running = RANKS // tp * SEQS
    assert counts(scheduler) == (running, RANKS * SEQS + 3 - running)


def test_what_finds_no_place_after_a_switch_waits_with_its_kv() -> None:
    scheduler = scheduler_in(1, limits_per="replica")
    add(scheduler, RANKS * SEQS)
    assert counts(scheduler) == (RANKS * SEQS, 0)
    assert scheduler.controller.request(8) is True
    assert counts(scheduler) == (SEQS, (RANKS - 1) * SEQS)
    assert scheduler.controller.report().switches[-1].migrated == RANKS * SEQS
    assert scheduler.controller.request(1) is True
    assert counts(scheduler) == (RANKS * SEQS, 0)


def test_a_layout_runs_no_more_than_the_policy_enters_it_with() -> None:
    policy = {"kind": "schedule", "switch_at": {"20": 4, "2": 8}}
    scheduler = scheduler_in(1, policy=policy)
    for tp, most in ((4, 16), (8, SEQS), (2, 2 * SEQS), (1, SEQS)):
        scheduler.controller.request(tp)
        assert scheduler.replica_set.layout.tp == tp
        for replica in scheduler.replica_set.replicas:
            assert replica.scheduler.max_num_running_reqs == most


# -------------------------------------------------------------------- grammars


class Backend:
    """Of grammars, which allow everything."""

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        import torch

        return torch.zeros(max_num_seqs, 1, dtype=torch.int32)

    def destroy(self) -> None: ...


def bitmask_of(seqs: int, most: int, requests: int) -> Any:
    """That of a step, by the manager of an engine that runs `seqs` requests, or `most`."""
    config, _ = engine_config(8)
    config.scheduler_config.max_num_seqs = seqs
    manager = StructuredOutputManager(config)
    make_room_for_grammars(manager, most)
    manager.backend = Backend()  # type: ignore[assignment]
    grammar = SimpleNamespace(
        is_terminated=lambda: False, fill_bitmask=lambda mask, index: mask[index].fill_(index)
    )
    one = SimpleNamespace(
        structured_output_request=SimpleNamespace(grammar=grammar, reasoning_ended=True),
        use_structured_output=True,
    )
    ids = [f"r{i}" for i in range(requests)]
    mask = manager.grammar_bitmask(dict.fromkeys(ids, one), ids, {})  # type: ignore[arg-type]
    manager.clear_backend()
    return mask


@pytest.mark.parametrize("seqs, most, requests", [(4, 32, 32), (100, 800, 300), (200, 200, 200)])
def test_every_request_of_a_layout_may_have_a_grammar(seqs: int, most: int, requests: int) -> None:
    """With more than 128, vLLM fills bitmasks in threads that it has for large engines."""
    assert bitmask_of(seqs, most, requests)[:, 0].tolist() == list(range(requests))


# -------------------------------------------------------------------- an engine

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["b", "c"]}}})


def jobs() -> dict[str, Job]:
    """As many as two ranks run, of every kind that a runner keeps rows for; all alive at once."""
    from vllm.sampling_params import StructuredOutputsParams

    always: dict[str, Any] = {"logprobs": 0, "ignore_eos": True, "max_tokens": 24}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0, "bad_words": ["a"]},
    ]
    made = {
        f"{kind} {index}": Job([3 + 7 * kind + index, 11, 5], always | sampling)
        for kind, sampling in enumerate(kinds)
        for index in range(2)
    }
    for name in ("0 0", "0 1", "1 0", "1 1", "2 0"):
        made[name].sampling["structured_outputs"] = StructuredOutputsParams(regex="[a-z ]{200}")
    return made


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    grammars = {"backend": "xgrammar"}
    with engine("qwen3", 2, {}, max_num_seqs=SEQS, structured_outputs_config=grammars) as llm:
        # The grammar is compiled once. Until then its requests wait, on a busy machine for long.
        run(llm, {name: job for name, job in jobs().items() if name == "0 0"})
        yield llm


def await_grammars(replica_set: ReplicaSet) -> None:
    """Wait until no request waits for a grammar, which vLLM compiles in a thread."""
    end = time.monotonic() + 60
    waiting = [one for replica in replica_set.replicas for one in replica.scheduler.waiting]
    for grammar in filter(None, (one.structured_output_request for one in waiting)):
        while grammar.grammar is None:
            assert time.monotonic() < end, "a grammar does not become ready"
            time.sleep(0.01)


def served(llm: Any, script: Mapping[int, int]) -> tuple[dict[str, Outcome], dict[int, list[int]]]:
    """Outcomes of the jobs, and what each replica ran at most, by tp; switches at `script`'s
    steps."""
    seen: dict[int, list[int]] = {}

    def before_step(step: int) -> None:
        if (tp := script.get(step)) is not None:
            pat_vllm.switch(llm, tp=tp)
        replica_set = scheduler_of(llm).replica_set
        await_grammars(replica_set)
        most = seen.setdefault(replica_set.layout.tp, [0] * len(replica_set.replicas))
        for replica in replica_set.replicas:
            most[replica.index] = max(most[replica.index], len(replica.scheduler.running))
            if step > 8:
                assert not replica.scheduler.waiting, "queued"

    assert llm.reset_prefix_cache()
    return run(llm, jobs(), before_step), seen


def alike(ours: Mapping[str, Outcome], theirs: Mapping[str, Outcome]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) == 2 * SEQS
    for name, one in ours.items():
        assert one.token_ids == theirs[name].token_ids, name
        assert one.logprobs == pytest.approx(theirs[name].logprobs, abs=1e-4), name


@pytest.fixture(scope="module")
def narrow(llm: Any) -> dict[str, Outcome]:
    """Outcomes at tp=1, where each replica runs half of them."""
    outcomes, seen = served(llm, {0: 1})
    assert seen == {1: [SEQS, SEQS]}
    return outcomes


@pytest.mark.slow
def test_a_group_of_two_runs_twice_as_many(llm: Any, narrow: dict[str, Outcome]) -> None:
    outcomes, seen = served(llm, {0: 2})
    assert seen == {2: [2 * SEQS]}
    alike(outcomes, narrow)


@pytest.mark.slow
def test_all_that_run_go_on_after_a_switch(llm: Any, narrow: dict[str, Outcome]) -> None:
    outcomes, seen = served(llm, {0: 1, 10: 2, 15: 1, 21: 2})
    assert seen == {1: [SEQS, SEQS], 2: [2 * SEQS]}
    alike(outcomes, narrow)


def views(worker: Any) -> dict[int, tuple[int, int, int]]:
    """Of each layout: requests, tokens, and where its input embeddings lie."""
    return {
        layout.tp: (
            runtime.runner.max_num_reqs,
            runtime.runner.max_num_tokens,
            runtime.runner.inputs_embeds.cpu.data_ptr(),
        )
        for layout, runtime in worker._runtimes.items()
    }


@pytest.mark.slow
def test_runners_have_their_layouts_limits(llm: Any) -> None:
    tokens = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    for found in llm.collective_rpc(views):
        (one, at), (two, there) = ((seen[:2], seen[2]) for seen in found.values())
        assert one == (SEQS, tokens)
        assert two == (2 * SEQS, min(2 * tokens, max(tokens, 16384)))
        assert at == there, "input embeddings are shared"
