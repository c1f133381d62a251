"""Outputs do not depend on the layouts they were generated in.

For each model: the tokens and log-probabilities of every ordered pair of layouts, with the switch
in mid-generation, against the same requests in one layout; and a storm of random switches. Tokens
must be equal, and the log-probability that was sampled after the switch must be the one that the
static target layout gives to that token, to 1e-4 (2e-4 for plain weights of some models).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

import pat_vllm
from pat_vllm.layout import Layout
from tests.engine.specs import (
    COPIES,
    FEW_KV_HEADS,
    FOUR_RANKS,
    FP8,
    FP8_MIXTURE,
    LATENT,
    MIXTURE,
    SPREAD_MIXTURE,
    WINDOWS,
)
from tests.support.cached_kv import assert_caches_hold_their_text
from tests.support.engines import Job, Outcome, add_job, run, scheduler_of
from tests.support.null_blocks import spoil_null_blocks
from tests.support.pool import EnginePool, EngineSpec, go_home
from tests.support.same import (
    FP8_KV_TOLERANCE,
    PLAIN_TOLERANCE,
    TOLERANCE,
    assert_teacher_forced,
)
from tests.support.stock import stock_answers

PLAIN = [MIXTURE, SPREAD_MIXTURE, FOUR_RANKS, FEW_KV_HEADS, COPIES, WINDOWS, LATENT]
pytestmark = pytest.mark.engine(*PLAIN, FP8, FP8_MIXTURE)

ENGINES = {
    "test_storm_of_trajectories": PLAIN,
    "test_the_next_turn_finds_its_kv_after_a_switch": [MIXTURE, FEW_KV_HEADS, WINDOWS, LATENT],
    "test_recomputing_gives_the_same": [MIXTURE, WINDOWS, LATENT],
    "test_teacher_forced_log_probabilities_after_a_switch": [FEW_KV_HEADS, WINDOWS, LATENT],
    "test_null_blocks_are_clear_after_a_switch": [FOUR_RANKS, WINDOWS, LATENT],
    "test_half_prefilled_and_waiting_requests_are_carried": [MIXTURE, WINDOWS, LATENT],
    "test_what_moves_is_what_requests_hold": [COPIES, WINDOWS, LATENT],
    "test_a_layout_asked_for_after_a_batch_holds_for_the_next": [COPIES],
    "test_an_idle_engine_returns_to_its_base_layout": [COPIES],
    "test_the_layouts_take_the_memory_of_one": [MIXTURE, SPREAD_MIXTURE, FOUR_RANKS, LATENT, FP8],
    "test_one_group_is_a_stock_engine": [COPIES, LATENT],
    "test_requests_stay_while_the_engine_sleeps": [LATENT],
}
"""Tests that run on some of the engines for every change; nightly they run on many more."""

AS_PACKED = (
    *("DeepseekV3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"),
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models whose plain weights keep to `TOLERANCE`, too: over all pairs and storms they differ by up
to 6.4e-5. Two static layouts of Mixtral are 1.3e-4 apart."""

COARSE = {"Gemma2ForCausalLM": 4e-4}
"""Models whose plain weights do not keep to `PLAIN_TOLERANCE` in one layout either: without a
switch the log-probabilities of a request differ by up to 2.8e-4 between two batches."""


class Case(NamedTuple):
    """An engine, the tp of its layouts, and what each of them gives for `batch()`."""

    llm: Any
    sizes: list[int]
    static: dict[int, dict[str, Outcome]]


@pytest.fixture
def case(llm: Any, engines: EnginePool) -> Case:
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]

    def run_static() -> dict[int, dict[str, Outcome]]:
        static = {tp: run(llm, batch(), before_step=at_steps(llm, {0: tp})) for tp in sizes}
        go_home(llm)
        return static

    return Case(llm, sizes, engines.keep("static", run_static))


def batch(seed: int = 0, requests: int = 6, longest: int = 70) -> dict[str, Job]:
    """Requests with prompts and outputs of many lengths; half greedy, half seeded."""
    rng = random.Random(seed)
    jobs = {}
    for i in range(requests):
        sampling: dict[str, Any] = {"max_tokens": rng.randint(longest // 3, longest), "logprobs": 0}
        sampling |= {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": 100 + i}
        prompt = [rng.randrange(3, 400) for _ in range(rng.randint(3, 150))]
        jobs[f"r{i}"] = Job(prompt, {**sampling, "ignore_eos": True})
    return jobs


def at_steps(llm: Any, switches: Mapping[int, int]) -> Callable[[int], None]:
    """For `run`: switches by the engine step before which they are made."""

    def before_step(step: int) -> None:
        if step in switches:
            assert pat_vllm.switch(llm, tp=switches[step])

    return before_step


def tolerance(llm: Any) -> float:
    config = llm.llm_engine.vllm_config
    if config.cache_config.cache_dtype.startswith("fp8"):
        return FP8_KV_TOLERANCE
    plain = (
        config.additional_config["pat"].get("weights") == "inplace"
        or config.parallel_config.worker_extension_cls
    )
    architecture = config.model_config.architecture
    as_packed = architecture in AS_PACKED
    return COARSE.get(architecture, PLAIN_TOLERANCE) if plain and not as_packed else TOLERANCE


def assert_same(llm: Any, outcomes: Mapping[str, Outcome], *static: Mapping[str, Outcome]) -> None:
    """Tokens are those of every static run; each log-probability is that of one of them."""
    assert all(outcomes.keys() == expected.keys() for expected in static)
    for name, outcome in outcomes.items():
        for expected in static:
            assert outcome.token_ids == expected[name].token_ids, name
        logprobs = zip(outcome.logprobs, *(run[name].logprobs for run in static), strict=True)
        apart = max(min(abs(own - other) for other in others) for own, *others in logprobs)
        print(f"{name}: log-probabilities up to {apart:.2e} apart")
        assert apart <= tolerance(llm), name


def switches_since(llm: Any, count: int) -> list[Any]:
    """The switches after the first `count`."""
    return pat_vllm.report(llm).switches[count:]


def switch_once(
    llm: Any, source: int, target: int, at: int, jobs: Mapping[str, Job] | None = None
) -> tuple[dict[str, Outcome], Any]:
    """Run `batch()` with one switch; its outcomes, and the report of the switch."""
    count = len(pat_vllm.report(llm).switches)
    outcomes = run(llm, jobs or batch(), before_step=at_steps(llm, {0: source, at: target}))
    (switch,) = [switch for switch in switches_since(llm, count) if switch.num_seqs]
    assert (switch.source.tp, switch.target.tp) == (source, target)
    return outcomes, switch


def test_single_layouts_agree_and_differ_by_request(case: Case) -> None:
    llm, sizes, static = case
    for tp in sizes[1:]:
        assert_same(llm, static[tp], static[sizes[0]])
    assert len({tuple(o.token_ids) for o in static[sizes[0]].values()}) == len(batch())


def test_every_ordered_pair_of_layouts(case: Case) -> None:
    """One switch in mid-generation, at a point that differs for each pair."""
    llm, sizes, static = case
    rng = random.Random(1)
    for source, target in itertools.permutations(sizes, 2):
        outcomes, switch = switch_once(llm, source, target, at=rng.randint(2, 20))
        assert_same(llm, outcomes, static[source], static[target])
        assert switch.migrated == switch.num_seqs == len(batch())
        assert switch.kv_bytes > 0


def test_null_blocks_are_clear_after_a_switch(case: Case) -> None:
    """The layout before had requests' blocks there. And no step reads them: NaN changes nothing."""
    llm, sizes, static = case
    clear: list[bool] = []
    for source, target in itertools.permutations(sizes[::-1], 2):

        def before_step(step: int, source: int = source, target: int = target) -> None:
            at_steps(llm, {0: source, 9: target})(step)
            if step in (0, 9):
                clear.append(spoil_null_blocks(llm))

        outcomes = run(llm, batch(), before_step=before_step)
        assert_same(llm, outcomes, static[source], static[target])
        assert clear[-1]


def held_bytes(llm: Any, target: Layout) -> int:
    """KV of the requests of an idle engine, as all ranks of a layout together hold it: of their
    blocks that are not null, and as often as ranks have the same heads."""
    replicas = scheduler_of(llm).replica_set.replicas
    return sum(
        len(kind.held(request.num_computed_tokens))
        * kind.block_bytes
        * (target.tp * len(kind.heads_of(target, 0)) // kind.heads)
        for replica in replicas
        for request in replica.scheduler.requests.values()
        for kind in replica.kinds
    )


def test_what_moves_is_what_requests_hold(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Null blocks do not move, and nothing is computed again, where no cached prefixes move, too.

    Prompts are longer and shorter than the windows of a model that has some.
    """
    llm, sizes, static = case
    monkeypatch.setattr(scheduler_of(llm).replica_set.chains, "latest", lambda: None)
    prompts = [len(job.prompt) for job in batch().values()]
    assert min(prompts) < 40 < 100 < max(prompts)
    held: list[int] = []
    for source, target in itertools.permutations(sizes, 2):

        def before_step(step: int, source: int = source, target: int = target) -> None:
            if step == 7:
                held.append(held_bytes(llm, Layout.of(target, sizes[-1])))
            at_steps(llm, {0: source, 7: target})(step)

        count = len(pat_vllm.report(llm).switches)
        outcomes = run(llm, batch(), before_step=before_step)
        assert_same(llm, outcomes, static[source], static[target])
        (switch,) = [s for s in switches_since(llm, count) if s.num_seqs]
        assert (switch.kv_bytes, switch.recomputed) == (held[-1], 0)


def turns(first: Mapping[str, Outcome] | None = None) -> dict[str, Job]:
    """The first turns of four conversations, or the second ones after what these gave."""
    rng = random.Random(8)
    sampling = {"max_tokens": 12, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    jobs = {}
    for i in range(4):
        prompt, more = (
            [rng.randrange(3, 400) for _ in range(rng.randint(*length))]
            for length in ((40, 150), (5, 40))
        )
        if first is not None:
            prompt = [*prompt, *first[f"t{i}"].token_ids, *more]
        jobs[f"t{i}" if first is None else f"again t{i}"] = Job(prompt, sampling)
    return jobs


def between_turns(
    llm: Any, source: int, target: int, again: dict[str, Job]
) -> Callable[[int], None]:
    """For `run`: starts in `source`; when one request is left, switches and adds the rest."""

    def before_step(step: int) -> None:
        if step == 0:
            assert pat_vllm.switch(llm, tp=source)
        elif again and scheduler_of(llm).get_num_unfinished_requests() == 1:
            assert pat_vllm.switch(llm, tp=target)
            while again:
                add_job(llm, *again.popitem())

    return before_step


def test_the_next_turn_finds_its_kv_after_a_switch(case: Case, engines: EnginePool) -> None:
    """Every ordered pair of layouts, with the switch between the turns, while a request runs.

    What the second turn gives is what it gives where it is computed from the start in one layout.
    """
    llm, sizes, _ = case

    def static_turns(tp: int) -> dict[str, Outcome]:
        both: dict[str, Outcome] = {}
        for _ in range(2):
            assert llm.reset_prefix_cache()
            both |= run(llm, turns(both or None), before_step=at_steps(llm, {0: tp}))
            go_home(llm)
        return both

    static = engines.keep("turns", lambda: {tp: static_turns(tp) for tp in sizes})
    # Long, since a replica may make many steps beside a slow one.
    anchor = Job([5, 6, 7], {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True})
    for source, target in itertools.permutations(sizes, 2):
        go_home(llm)
        count = len(pat_vllm.report(llm).switches)
        again = turns(static[source])
        between = between_turns(llm, source, target, again)
        outcomes = run(llm, turns() | {"anchor": anchor}, before_step=between)
        assert outcomes.pop("anchor")
        (switch,) = [s for s in switches_since(llm, count) if s.num_seqs]
        assert_same(llm, outcomes, static[source], static[target])
        cached = {name: outcome.num_cached_tokens for name, outcome in outcomes.items()}
        for i in range(4):
            # The KV of the last token of a response is not computed.
            known = len(turns()[f"t{i}"].prompt) + 11
            whole = known - known % llm.llm_engine.vllm_config.cache_config.block_size
            assert (cached[f"t{i}"], cached[f"again t{i}"]) == (0, whole)
        assert switch.cached_tokens == sum(tokens or 0 for tokens in cached.values())


@pytest.mark.parametrize("ways", [("recompute",), ("recompute", "migrate")])
def test_recomputing_gives_the_same(
    case: Case, ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ordered pair again, with each request's KV left behind, or left behind for some."""
    llm, sizes, static = case
    rng = random.Random(5)
    costs = scheduler_of(llm).controller.costs
    monkeypatch.setattr(costs, "choose", lambda *request: rng.choice(ways))
    for source, target in itertools.permutations(sizes, 2):
        outcomes, switch = switch_once(llm, source, target, at=9)
        assert_same(llm, outcomes, static[source], static[target])
        assert switch.recomputed > 0
        assert switch.recomputed + switch.migrated == len(batch())


def test_teacher_forced_log_probabilities_after_a_switch(case: Case) -> None:
    """What was sampled after a switch is what the static target layout would have said."""
    llm, sizes, _ = case
    jobs = batch(2)
    for source, target in itertools.permutations(sizes, 2):
        outcomes = run(llm, jobs, before_step=at_steps(llm, {0: source, 6: target}))
        pat_vllm.switch(llm, tp=target)
        assert_teacher_forced(llm, jobs, outcomes, tolerance(llm))


def test_half_prefilled_and_waiting_requests_are_carried(case: Case) -> None:
    """A switch while one prompt is half computed and others wait for a slot."""
    llm, sizes, _ = case
    # Of greedy runs with no near tie, which another machine's rounding would decide otherwise.
    rng = random.Random(24)
    sampling = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    jobs = {f"p{i}": Job([rng.randrange(3, 400) for _ in range(300)], sampling) for i in range(40)}
    expected = run(llm, jobs, before_step=at_steps(llm, {0: sizes[0]}))
    for target in sizes[1:]:
        count = len(pat_vllm.report(llm).switches)
        llm.reset_prefix_cache()
        switches = {0: sizes[0], 2: target, 4: sizes[0], 7: target}
        assert_same(llm, run(llm, jobs, before_step=at_steps(llm, switches)), expected)
        carried = [s for s in switches_since(llm, count) if s.num_seqs == len(jobs)]
        assert any(0 < s.migrated < s.num_seqs for s in carried), carried


def test_requests_stay_while_the_engine_sleeps(case: Case) -> None:
    """Some decode, and the prompt of one is not computed yet; a switch in between."""
    llm, sizes, static = case
    jobs = batch()
    jobs["r5"] = Job(jobs["r5"].prompt, jobs["r5"].sampling, arrives=15)

    def before_step(step: int) -> None:
        at_steps(llm, {0: sizes[0]})(step)
        if step == 15:
            llm.sleep(level=0, mode="keep")
            assert pat_vllm.switch(llm, tp=sizes[-1])
            assert llm.llm_engine.is_sleeping()
            llm.wake_up(tags=["scheduling"])

    assert_same(llm, run(llm, jobs, before_step), static[sizes[0]], static[sizes[-1]])


def test_random_switch_storm(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 and more switches in one generation, while requests arrive and are aborted."""
    llm, sizes, static = case
    rng = random.Random(4)
    costs = scheduler_of(llm).controller.costs
    ways = ("migrate", "migrate", "recompute")
    monkeypatch.setattr(costs, "choose", lambda *request: rng.choice(ways))
    late = {
        name.replace("r", "late"): Job(job.prompt, job.sampling, arrives=rng.randint(1, 40))
        for name, job in batch().items()
    }
    doomed = {
        f"doomed{i}": Job([5 + i] * 40, {"max_tokens": 200, "ignore_eos": True}, arrives=5 * i)
        for i in range(6)
    }
    switches = 0

    def before_step(step: int) -> None:
        nonlocal switches
        if step % 2 == 1:
            assert pat_vllm.switch(llm, tp=rng.choice(sizes))
            switches += 1
        for name, job in doomed.items():
            if step == job.arrives + 8:
                llm.llm_engine.abort_request([name])

    count = len(pat_vllm.report(llm).switches)
    outcomes = run(llm, batch() | late | doomed, before_step=before_step)
    first = {name: o for name, o in outcomes.items() if name.startswith("r")}
    assert_same(llm, first, *static.values())
    second = {n.replace("late", "r"): o for n, o in outcomes.items() if n.startswith("late")}
    assert_same(llm, second, *static.values())
    assert switches >= 30
    assert len(switches_since(llm, count)) >= 12, "most switches went nowhere"


def test_storm_of_trajectories(case: Case, engines: EnginePool) -> None:
    """Five turns of six conversations, while layouts change, caches are reset, requests aborted."""
    llm, sizes, _ = case
    rng = random.Random(9)
    scheduler = scheduler_of(llm)
    sampling = {"max_tokens": 9, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    said = [[[rng.randrange(3, 400) for _ in range(rng.randint(20, 60))] for _ in range(5)]
            for _ in range(6)]  # fmt: skip

    def turn(index: int, before: Mapping[str, Outcome], arrives: int = 0) -> dict[str, Job]:
        """One turn of all, after what earlier ones gave."""
        jobs = {}
        for i, words in enumerate(said):
            prompt = list(words[0])
            for j in range(index):
                prompt += [*before[f"s{i}-{j}"].token_ids, *words[j + 1]]
            jobs[f"s{i}-{index}"] = Job(prompt, sampling, arrives=arrives + 3 * i)
        return jobs

    def static_turns(tp: int) -> dict[str, Outcome]:
        given: dict[str, Outcome] = {}
        for index in range(5):
            assert llm.reset_prefix_cache()
            given |= run(llm, turn(index, given), before_step=at_steps(llm, {0: tp}))
            go_home(llm)
        return given

    every = engines.keep("trajectories", lambda: {tp: static_turns(tp) for tp in sizes})
    static = every[sizes[0]]
    jobs = {name: job for i in range(5) for name, job in turn(i, static, 45 * i).items()}
    doomed = {
        f"doomed{i}": Job(job.prompt, {"max_tokens": 60}, arrives=job.arrives + 5)
        for i, job in enumerate(list(jobs.values())[7::5])
    }

    def before_step(step: int) -> None:
        if step % 3 == 1:
            assert pat_vllm.switch(llm, tp=rng.choice(sizes))
        if step in (70, 150):
            scheduler.reset_prefix_cache(reset_running_requests=True)
        for name, job in doomed.items():
            if step == job.arrives + 4:
                llm.llm_engine.abort_request([name])

    count = len(pat_vllm.report(llm).switches)
    outcomes = run(llm, jobs | doomed, before_step=before_step)
    outcomes = {name: outcome for name, outcome in outcomes.items() if name in jobs}
    assert_same(llm, outcomes, *every.values())
    switches = switches_since(llm, count)
    assert len(switches) >= 20 and sum(switch.cached_tokens for switch in switches) > 1000
    assert sum(outcome.num_cached_tokens or 0 for outcome in outcomes.values()) > 1000
    for replica in scheduler.replica_set.replicas:
        pool = replica.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a block is lost"
    texts = [[*job.prompt, *static[name].token_ids] for name, job in jobs.items() if "-4" in name]
    assert assert_caches_hold_their_text(llm, texts) > 20


def test_a_layout_asked_for_after_a_batch_holds_for_the_next(case: Case) -> None:
    """Also when a step of the batch before, whose requests were aborted, is still in flight."""
    llm, sizes, _ = case
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    llm.llm_engine.add_request("doomed", {"prompt_token_ids": [5, 6, 7]}, SamplingParams())
    core.model_executor.execute_model(core.scheduler.schedule(), non_block=True)
    core.model_executor.sample_tokens(None, non_block=True)
    llm.llm_engine.abort_request(["doomed"])
    assert core.scheduler.replica_set.in_flight

    seen = set()

    def before_step(step: int) -> None:
        if step == 0:
            assert pat_vllm.switch(llm, tp=sizes[-1])
        seen.add(pat_vllm.report(llm).layout.tp)

    run(llm, batch(), before_step=before_step)
    assert seen == {sizes[-1]}


def test_an_idle_engine_returns_to_its_base_layout(case: Case) -> None:
    llm, sizes, _ = case
    run(llm, batch(0, requests=2), before_step=at_steps(llm, {0: sizes[-1]}))
    llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
    assert pat_vllm.report(llm).layout.tp == sizes[0]


def weight_bytes(worker: Any) -> tuple[int, int]:
    """Bytes of the weights of all layouts of a rank, and of its base layout alone.

    Without those that vLLM makes of latent attention's in 16 bits, which each layout has to itself
    if these are quantized.
    """

    def storages(runtimes: Any) -> dict[int, int]:
        sizes = {}
        for runtime in runtimes:
            model = runtime.runner.get_model()
            tensors = [*model.named_parameters(), *model.named_buffers()]
            for name, tensor in tensors:
                if name.endswith(("W_UV", "W_UK_T")):
                    continue
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        return sizes

    layouts = list(worker._runtimes.values())
    return sum(storages(layouts).values()), sum(storages(layouts[:1]).values())


def test_the_layouts_take_the_memory_of_one(case: Case) -> None:
    """With weights in place."""
    llm, sizes, _ = case
    for tp in reversed(sizes):
        pat_vllm.switch(llm, tp=tp)
        for every, base in llm.collective_rpc(weight_bytes):
            assert base > 100_000
            assert every <= 1.02 * base


def test_one_group_is_a_stock_engine(case: Case, spec: EngineSpec) -> None:
    """With plain weights on both sides. A batch cut in two is rounded otherwise."""
    llm, _, static = case
    stock = stock_answers(
        spec.model,
        batch(),
        ranks=2,
        max_num_batched_tokens=1000,
        worker_extension_cls="tests.support.weight_updates.WeightUpdates",
    )
    replicas, group = static[1], static[2]
    for name, outcome in stock.items():
        assert group[name].token_ids == outcome.token_ids == replicas[name].token_ids
        assert group[name].logprobs == pytest.approx(outcome.logprobs, abs=1e-5)
    apart = max(
        abs(together - halved)
        for name, outcome in stock.items()
        for together, halved in zip(outcome.logprobs, replicas[name].logprobs, strict=True)
    )
    print(f"log-probabilities of six requests together and of three and three: {apart:.2e} apart")
    assert apart <= tolerance(llm)
