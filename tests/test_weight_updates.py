"""New weights reach every layout, whatever layout is active and however they arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import pat_vllm
from tests.engines import Job, Outcome, engine, run, scheduler_of
from tests.models import random_model

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
OLD, NEW = "qwen3", "qwen3_updated"
PLAIN: dict[str, Any] = {"worker_extension_cls": "tests.support.weight_updates.WeightUpdates"}
SIZES = (1, 2, 4)


def batch(name: str = "r") -> dict[str, Job]:
    rng = random.Random(0)
    return {
        f"{name}{i}": Job(
            [rng.randrange(3, 400) for _ in range(rng.randint(3, 60))],
            {"max_tokens": 6 + 3 * i, "temperature": 0.0, "logprobs": 0, "ignore_eos": True},
        )
        for i in range(5)
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Outcome]]:
    """What stock vLLM generates with each of the weights, and with both."""
    outcomes = {}
    for model in (NEW, OLD):
        with engine(model, 1, None, **PLAIN) as llm:
            outcomes[model] = run(llm, batch())
            if model == OLD:
                outcomes["under way"] = updated_under_way(llm, {})
    assert outcomes[OLD] != outcomes[NEW]
    return outcomes


FOR_EVERY_CHANGE = "test_nothing_that_happens_between_two_batches_leaves_stale_weights"
"""Of the tests with copies of the weights: it has all ways of an update, and all layouts."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "llm" in metafunc.fixturenames:
        nightly = () if metafunc.function.__name__ == FOR_EVERY_CHANGE else pytest.mark.nightly
        copies = pytest.param("materialized", marks=nightly)
        metafunc.parametrize("llm", [copies, "inplace"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    with engine(OLD, 4, {"kv_transfer": "migrate", "weights": request.param}, **PLAIN) as llm:
        yield llm


def load_all(llm: Any, model: str) -> None:
    llm.collective_rpc("load_all", args=(str(random_model(model)),))


def load_one_by_one(llm: Any, model: str) -> None:
    from safetensors.torch import load_file

    for name, weight in load_file(random_model(model) / "model.safetensors").items():
        llm.collective_rpc("load_one", args=(name, weight))


def call_function(llm: Any, model: str) -> None:
    path = str(random_model(model))
    llm.collective_rpc(lambda worker: worker.load_all(path))


def reload(llm: Any, model: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(random_model(model))})


UPDATES = (load_all, load_one_by_one, call_function, reload)


def update(llm: Any, model: str, how: Any = load_all) -> None:
    how(llm, model)
    llm.reset_prefix_cache()


def assert_same(
    outcomes: dict[str, Outcome], expected: dict[str, Outcome], tolerance: float = TOLERANCE
) -> None:
    assert outcomes.keys() == expected.keys()
    for name, outcome in outcomes.items():
        assert outcome.token_ids == expected[name].token_ids, name
        assert outcome.logprobs == pytest.approx(expected[name].logprobs, abs=tolerance), name


@pytest.mark.parametrize(
    ("how", "at"), [*((load_all, at) for at in SIZES), *((how, 4) for how in UPDATES[1:])]
)
def test_an_update_reaches_every_layout(llm: Any, expected: Any, how: Any, at: int) -> None:
    """It arrives while the layout `at` is active."""
    for model in (NEW, OLD):
        pat_vllm.switch(llm, tp=at)
        update(llm, model, how)
        assert pat_vllm.report(llm).layout.tp == at
        for tp in (at, *SIZES):

            def before_step(step: int, tp: int = tp) -> None:
                if step == 0:
                    assert pat_vllm.switch(llm, tp=tp)

            assert_same(run(llm, batch(), before_step=before_step), expected[model])


def test_nothing_that_happens_between_two_batches_leaves_stale_weights(
    llm: Any, expected: Any
) -> None:
    """Random sequences of switches, updates, sleeps of both levels, and batches with switches."""
    check_any_order(llm, expected, (OLD, NEW), SIZES, UPDATES)


def check_any_order(
    llm: Any,
    expected: dict[str, dict[str, Outcome]],
    models: tuple[str, str],
    layouts: Sequence[Any],
    updates: Sequence[Any],
    tolerance: float = TOLERANCE,
) -> None:
    """See the test. The engine has the first of the models, before and after."""
    rng = random.Random(1)
    model = models[0]
    update(llm, model)
    for _ in range(12):
        for _ in range(rng.randint(0, 4)):
            match rng.choice(("switch", "switch", "update", "update", "doze", "sleep")):
                case "switch":
                    pat_vllm.switch(llm, tp=rng.choice(layouts))
                case "update":
                    model = rng.choice(models)
                    update(llm, model, rng.choice(updates))
                case "doze":
                    llm.sleep(level=1)
                    llm.wake_up()
                case "sleep":
                    model = rng.choice(models)
                    llm.sleep(level=2)
                    llm.collective_rpc("lose_weights")
                    llm.wake_up(["weights"])
                    load_all(llm, model)
                    llm.wake_up(["kv_cache"])

        def before_step(step: int) -> None:
            if rng.random() < 0.15:
                assert pat_vllm.switch(llm, tp=rng.choice(layouts))

        assert_same(run(llm, batch(), before_step=before_step), expected[model], tolerance)
    update(llm, models[0])


def generated(llm: Any) -> int | None:
    """Tokens of the engine's only request; None while its next one is being computed."""
    scheduler = scheduler_of(llm)
    active = getattr(scheduler, "replica_set", None)
    if active is not None and active.in_flight:
        return None
    schedulers = [scheduler] if active is None else [one.scheduler for one in active.replicas]
    for one in schedulers:
        for request in one.requests.values():
            return request.num_output_tokens
    return None


def updated_under_way(llm: Any, switches: dict[int, int]) -> dict[str, Outcome]:
    """A request that gets new weights at its fifth token; `switches`: tokens generated -> tp."""
    name, job = max(batch().items())
    seen = set()

    def before_step(step: int) -> None:
        tokens = 0 if step == 0 else generated(llm)
        if tokens is None or tokens in seen:
            return
        seen.add(tokens)
        if tokens in switches:
            assert pat_vllm.switch(llm, tp=switches[tokens])
        if tokens == 5:
            load_all(llm, NEW)

    found = run(llm, {name: job}, before_step=before_step)
    assert seen >= {0, 5, *switches}
    return found


def test_an_update_under_way_is_as_in_stock_vllm(llm: Any, expected: Any) -> None:
    """Requests in flight go on with the new weights and the KV that they have."""
    for switches in ({0: 1}, {0: 4}, {0: 2, 4: 4}, {0: 4, 6: 1}, {0: 1, 5: 2, 8: 4}):
        update(llm, OLD)
        assert_same(updated_under_way(llm, switches), expected["under way"])
    update(llm, OLD)


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_between_sleep_and_waking_up(llm: Any, expected: Any, level: int) -> None:
    """In the order of a trainer whose model shares the devices."""
    for model in (NEW, OLD):
        pat_vllm.switch(llm, tp=2)
        llm.sleep(level=level)
        llm.collective_rpc("lose_weights")
        assert not pat_vllm.switch(llm, tp=4)
        assert pat_vllm.report(llm).refused[-1].why == "the engine sleeps; wake it up first"
        llm.wake_up(["weights"])
        load_all(llm, model)
        llm.wake_up(["kv_cache"])
        for tp in SIZES:
            pat_vllm.switch(llm, tp=tp)
            assert_same(run(llm, batch()), expected[model])


def test_methods_that_change_the_model_run_in_every_layout(llm: Any, expected: Any) -> None:
    token = next(iter(expected[OLD].values())).token_ids[0]
    llm.collective_rpc("forbid_token", args=(token,))
    outcomes = []
    for tp in SIZES:
        pat_vllm.switch(llm, tp=tp)
        outcomes.append(run(llm, batch()))
        assert all(token not in one.token_ids for one in outcomes[-1].values())
        assert_same(outcomes[-1], outcomes[0])
    llm.collective_rpc("allow_token")
    assert_same(run(llm, batch()), expected[OLD])


def test_packed_weights_refuse_an_update_and_allow_anything_else() -> None:
    """What vLLM makes of linear weights on CPU cannot be derived from."""
    with engine(OLD, 2, {}) as llm:
        before = run(llm, batch())
        assert llm.collective_rpc(lambda worker: worker.rank) == [0, 1]
        for way in (
            lambda: reload(llm, NEW),
            lambda: llm.collective_rpc(
                lambda worker: worker.model_runner.model.load_weights([("x", None)])
            ),
        ):
            with pytest.raises(RuntimeError, match=r"cannot be updated.*layouts tp1dp2, tp2dp1"):
                way()
        assert_same(run(llm, batch()), before)
        pat_vllm.switch(llm, tp=2)
        assert_same(run(llm, batch()), before)
