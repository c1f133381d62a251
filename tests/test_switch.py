"""Outputs do not depend on the layouts they were generated in.

For each model: the tokens and log-probabilities of every ordered pair of layouts, with the switch
in mid-generation, against the same requests in one layout; and a storm of random switches. Tokens
must be equal, and the log-probability that was sampled after the switch must be the one that the
static target layout gives to that token, to 1e-4 (2e-4 for plain weights of some models).
"""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any, NamedTuple

import pytest

import pat_vllm
from pat_vllm.layout import Layout
from pat_vllm.scheduler import in_place
from tests.engines import Job, engine, run, scheduler_of, teacher_forced

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
PLAIN_TOLERANCE = 2e-4
"""For plain weights on CPU. Their kernels round by the size of the batch more than those for packed
weights: stock vLLM's log-probabilities of a request differ by up to 1.05e-4 between two batches."""
AS_PACKED = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Models whose plain weights keep to `TOLERANCE`, too: over all pairs and storms they differ by up
to 6.4e-5. Two static layouts of Mixtral are 1.3e-4 apart."""


class Switching(NamedTuple):
    """An engine whose switches are tested: model, ranks and options of PAT."""

    model: str
    ranks: int
    base_tp: int = 1
    weights: str = "inplace"
    experts: str = "auto"

    def __str__(self) -> str:
        values = zip(self, (None, None, 1, None, "auto"), strict=True)
        return "-".join(str(value) for value, usual in values if value != usual)


# Weights in place for all; copies, which tests/test_weights.py compares with vLLM's byte for byte
# and tests/test_ray.py has for every change, for one, and for a mixture.
CASES = [
    Switching("llama_gqa", 2),
    GROUPED := Switching("qwen2", 2),
    TIED := Switching("qwen3_tied", 2),
    LONG := Switching("qwen3", 4),
    FEW_KV_HEADS := Switching("llama_few_kv", 4, base_tp=2),
    # Experts cut and spread; with shared ones, which are always cut, and six over four ranks.
    MIXTURE := Switching("qwen3_moe", 2),
    LONG_MIXTURE := Switching("qwen2_moe", 4),
    SHARED := Switching("qwen2_moe", 2),
    FOUR_RANKS := Switching("qwen3_moe", 4),
    # Names, norms and routers of their own.
    MIXTRAL := Switching("mixtral", 2),
    OLMOE := Switching("olmoe", 2),
    GLM := Switching("glm4_moe", 2),
    # Experts of one kind, as where no rank has any whole.
    CUT := Switching("qwen3_moe", 4, base_tp=2, experts="tp"),
    SPREAD := Switching("qwen3_moe", 4, base_tp=2, experts="ep"),
    COPIES := Switching("qwen2", 2, weights="materialized"),
    COPIED_MIXTURE := Switching("qwen3_moe", 2, weights="materialized"),
    LONG_COPIED_MIXTURE := Switching("qwen3_moe", 4, weights="materialized"),
]


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


NIGHTLY = {
    "test_recomputing_gives_the_same",
    "test_teacher_forced_log_probabilities_after_a_switch",
    "test_half_prefilled_and_waiting_requests_are_carried",
    "test_a_layout_asked_for_after_a_batch_holds_for_the_next",
    "test_an_idle_engine_returns_to_its_base_layout",
}
"""What takes long on four ranks. For every change it runs on two, and between tp=2 and tp=4."""
PAIRS = "test_every_ordered_pair_of_layouts"
ONLY = {
    "test_blocks_are_short_between_kinds_of_one_tp": [MIXTURE, FOUR_RANKS],
    "test_the_layouts_take_the_memory_of_one": [TIED, LONG, LONG_MIXTURE, CUT, SPREAD, FOUR_RANKS],
    "test_one_group_is_a_stock_engine": [GROUPED],
}
"""Tests for some of the cases, all of them with weights in place."""


def is_nightly(name: str, case: Switching) -> bool:
    # Nothing of KV heads is in it: what is computed again is a prompt in one layout.
    recomputed = case == FEW_KV_HEADS and name == "test_recomputing_gives_the_same"
    long = case in (LONG, LONG_MIXTURE) and name in NIGHTLY
    pairs = case == LONG_MIXTURE and name == PAIRS  # 20 of them
    copied = case == COPIED_MIXTURE and name != PAIRS
    rare = (COPIES, CUT, SPREAD, SHARED, FOUR_RANKS, LONG_COPIED_MIXTURE, MIXTRAL, OLMOE, GLM)
    return recomputed or long or pairs or copied or case in rare


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    name = metafunc.function.__name__
    metafunc.parametrize(
        "case",
        [
            pytest.param(
                one,
                id=str(one),
                marks=[pytest.mark.nightly] if is_nightly(name, one) else [],
            )
            for one in ONLY.get(name, CASES)
        ],
        indirect=True,
        scope="module",
    )


@pytest.fixture(scope="module")
def case(request):
    """See `make_case`. A module that runs these tests on another kind of engine has its own."""
    with make_case(**request.param._asdict()) as case:
        yield case


@contextlib.contextmanager
def make_case(model, ranks, **pat):
    """An engine that switches only when told, and the batch's outcomes in each single layout."""
    pat = {"kv_transfer": "migrate", **pat}
    # Large enough for a batch's prompts at once: on CPU, vLLM cannot prefill a seeded request in
    # chunks ("CPU Generator does not use offset").
    with engine(model, ranks, pat, max_num_batched_tokens=1000) as llm:
        names = [str(layout) for layout in pat_vllm.report(llm).layouts]
        static = {}
        for name in names:
            static[name] = run(llm, batch(), before_step=at_steps(llm, {0: name}))
        yield llm, names, static


def at_steps(llm, switches):
    def before_step(step):
        if step in switches:
            assert pat_vllm.switch(llm, tp=switches[step])

    return before_step


def tolerance(llm):
    config = llm.llm_engine.vllm_config
    plain = config.additional_config["pat"].get("weights") == "inplace"
    as_packed = config.model_config.architecture in AS_PACKED
    return PLAIN_TOLERANCE if plain and not as_packed else TOLERANCE


def assert_same(llm, outcomes, *static):
    """Tokens are those of every static run; each log-probability is that of one of them."""
    assert all(outcomes.keys() == expected.keys() for expected in static)
    for name, outcome in outcomes.items():
        for expected in static:
            assert outcome.token_ids == expected[name].token_ids, name
        found = zip(outcome.logprobs, *(one[name].logprobs for one in static), strict=True)
        apart = [min(abs(one - other) for other in others) for one, *others in found]
        print(f"{name}: log-probabilities up to {max(apart):.2e} apart")
        assert max(apart) <= tolerance(llm), (name, apart)


def new_switches(llm, before):
    return pat_vllm.report(llm).switches[before:]


def test_single_layouts_agree_and_differ_by_request(case):
    llm, names, static = case
    for name in names[1:]:
        assert_same(llm, static[name], static[names[0]])
    assert len({tuple(o.token_ids) for o in static[names[0]].values()}) == len(batch())


def test_every_ordered_pair_of_layouts(case):
    """One switch in mid-generation, at a point that differs for each pair."""
    llm, names, static = case
    rng = random.Random(1)
    for source, target in itertools.permutations(names, 2):
        at = rng.randint(2, 20)
        before = len(pat_vllm.report(llm).switches)
        outcomes = run(llm, batch(), before_step=at_steps(llm, {0: source, at: target}))
        assert_same(llm, outcomes, static[source], static[target])
        (made,) = [s for s in new_switches(llm, before) if s.num_seqs]
        assert (str(made.source), str(made.target)) == (source, target)
        assert made.migrated == made.num_seqs == len(batch())
        assert (made.kv_bytes > 0) == (made.source.tp != made.target.tp)


def test_recomputing_gives_the_same(case, monkeypatch):
    """Every ordered pair again, with each request's KV left behind, or left behind for some."""
    llm, names, static = case
    rng = random.Random(5)
    for source, target in itertools.permutations(names, 2):
        if Layout.parse(source).tp == Layout.parse(target).tp:
            continue  # nothing is gained by it
        for ways in (("recompute",), ("recompute", "migrate")):
            monkeypatch.setattr(
                scheduler_of(llm).controller.costs,
                "choose",
                lambda *request, ways=ways: rng.choice(ways),
            )
            before = len(pat_vllm.report(llm).switches)
            outcomes = run(llm, batch(), before_step=at_steps(llm, {0: source, 9: target}))
            assert_same(llm, outcomes, static[source], static[target])
            (made,) = [s for s in new_switches(llm, before) if s.num_seqs]
            assert made.recomputed > 0
            assert made.recomputed + made.migrated == len(batch())


def test_blocks_are_short_between_kinds_of_one_tp(case, monkeypatch):
    """What runs cannot keep its places, and its KV is copied to others."""
    llm, names, static = case
    monkeypatch.setattr(in_place, "_blocks_of_a_step", lambda scheduler: [1 << 30])
    for source, target in itertools.permutations(names, 2):
        if Layout.parse(source).tp != Layout.parse(target).tp:
            continue
        before = len(pat_vllm.report(llm).switches)
        outcomes = run(llm, batch(), before_step=at_steps(llm, {0: source, 9: target}))
        assert_same(llm, outcomes, static[source], static[target])
        (made,) = [s for s in new_switches(llm, before) if s.num_seqs]
        assert made.kv_bytes > 0 and made.migrated == len(batch())


def test_teacher_forced_log_probabilities_after_a_switch(case):
    """What was sampled after a switch is what the static target layout would have said."""
    llm, names, _ = case
    for source, target in itertools.permutations(names, 2):
        outcomes = run(llm, batch(2), before_step=at_steps(llm, {0: source, 6: target}))
        pat_vllm.switch(llm, tp=target)
        scores = teacher_forced(
            llm, {name: (job.prompt, outcomes[name].token_ids) for name, job in batch(2).items()}
        )
        for name, outcome in outcomes.items():
            assert outcome.logprobs == pytest.approx(scores[name], abs=tolerance(llm)), (
                source,
                target,
            )


def test_half_prefilled_and_waiting_requests_are_carried(case):
    """A switch while one prompt is half computed and others wait for a slot."""
    llm, names, _ = case
    # Of greedy runs with no near tie, which another machine's rounding would decide otherwise.
    rng = random.Random(24)
    jobs = {
        f"p{i}": Job(
            [rng.randrange(3, 400) for _ in range(300)],
            {"max_tokens": 8, "temperature": 0.0, "logprobs": 0, "ignore_eos": True},
        )
        for i in range(40)
    }
    expected = run(llm, jobs, before_step=at_steps(llm, {0: names[0]}))
    for target in names[1:]:
        before = len(pat_vllm.report(llm).switches)
        llm.reset_prefix_cache()
        switches = {0: names[0], 2: target, 4: names[0], 7: target}
        assert_same(llm, run(llm, jobs, before_step=at_steps(llm, switches)), expected)
        carried = [s for s in new_switches(llm, before) if s.num_seqs == len(jobs)]
        assert any(0 < s.migrated < s.num_seqs for s in carried), new_switches(llm, before)


def test_random_switch_storm(case, monkeypatch):
    """30 and more switches in one generation, while requests arrive and are aborted."""
    llm, names, static = case
    rng = random.Random(4)
    monkeypatch.setattr(
        scheduler_of(llm).controller.costs,
        "choose",
        lambda *request: rng.choice(("migrate", "migrate", "recompute")),
    )
    jobs = batch(0) | {
        name.replace("r", "late"): Job(job.prompt, job.sampling, arrives=rng.randint(1, 40))
        for name, job in batch(0).items()
    }
    doomed = {
        f"doomed{i}": Job([5 + i] * 40, {"max_tokens": 200, "ignore_eos": True}, arrives=5 * i)
        for i in range(6)
    }
    switches = 0

    def before_step(step):
        nonlocal switches
        if step % 2 == 1:
            assert pat_vllm.switch(llm, tp=rng.choice(names))
            switches += 1
        for name, job in doomed.items():
            if step == job.arrives + 8:
                llm.llm_engine.abort_request([name])

    before = len(pat_vllm.report(llm).switches)
    outcomes = run(llm, jobs | doomed, before_step=before_step)
    finished = {name: o for name, o in outcomes.items() if not name.startswith("doomed")}
    assert_same(llm, {n: o for n, o in finished.items() if n.startswith("r")}, *static.values())
    late = {n.replace("late", "r"): o for n, o in finished.items() if n.startswith("late")}
    assert_same(llm, late, *static.values())
    assert switches >= 30
    assert len(new_switches(llm, before)) >= 12, "most switches went nowhere"


def test_a_layout_asked_for_after_a_batch_holds_for_the_next(case):
    """Also when a step of the batch before, whose requests were aborted, is still in flight."""
    llm, names, _ = case
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    llm.llm_engine.add_request("doomed", {"prompt_token_ids": [5, 6, 7]}, SamplingParams())
    core.model_executor.execute_model(core.scheduler.schedule(), non_block=True)
    core.model_executor.sample_tokens(None, non_block=True)
    llm.llm_engine.abort_request(["doomed"])
    assert core.scheduler.replica_set.in_flight

    seen = set()

    def before_step(step):
        if step == 0:
            assert pat_vllm.switch(llm, tp=names[-1])
        seen.add(str(pat_vllm.report(llm).layout))

    run(llm, batch(0), before_step=before_step)
    assert seen == {names[-1]}


def test_an_idle_engine_returns_to_its_base_layout(case):
    llm, names, _ = case
    run(llm, batch(0, requests=2), before_step=at_steps(llm, {0: names[-1]}))
    llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
    assert str(pat_vllm.report(llm).layout) == names[0]


# ---------------------------------------------------------------- weights in place


def weight_bytes(worker: Any) -> tuple[int, int]:
    """Bytes of the weights of all layouts of a rank, and of its base layout alone."""

    def storages(runtimes: Any) -> dict[int, int]:
        found = {}
        for runtime in runtimes:
            model = runtime.runner.get_model()
            for tensor in [*model.parameters(), *model.buffers()]:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return found

    layouts = list(worker._runtimes.values())
    return sum(storages(layouts).values()), sum(storages(layouts[:1]).values())


def test_the_layouts_take_the_memory_of_one(case):
    llm, names, _ = case
    for name in reversed(names):
        pat_vllm.switch(llm, tp=name)
        for every, base in llm.collective_rpc(weight_bytes):
            print(f"{name}: weights of all layouts / base layout's: {every / base:.4f}")
            assert base > 100_000
            assert every <= 1.02 * base


def test_one_group_is_a_stock_engine(case):
    """With plain weights on both sides. A batch cut in two is rounded otherwise."""
    _, _, static = case
    plain: dict[str, Any] = {"worker_extension_cls": "tests.support.weight_updates.WeightUpdates"}
    with engine("qwen2", 2, None, max_num_batched_tokens=1000, **plain) as llm:
        stock = run(llm, batch())
    replicas, group = static["tp1dp2"], static["tp2dp1"]
    for name, one in stock.items():
        assert group[name].token_ids == one.token_ids == replicas[name].token_ids
        assert group[name].logprobs == pytest.approx(one.logprobs, abs=1e-5)
    apart = max(
        abs(a - b)
        for name, one in stock.items()
        for a, b in zip(one.logprobs, replicas[name].logprobs, strict=True)
    )
    print(f"log-probabilities of six requests together and of three and three: {apart:.2e} apart")
