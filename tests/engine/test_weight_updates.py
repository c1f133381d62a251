"""New weights reach every layout, whatever layout is active and however they arrive.

Engines: four ranks in place, mixtures with experts cut and spread, copies of weights.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import vllm

import pat_vllm
from tests.engine.specs import COPIES, DENSE, FOUR_RANKS, FP8, FP8_MIXTURE, LATENT, SPREAD_MIXTURE
from tests.engine.test_switch import at_steps
from tests.support.cached_kv import assert_caches_hold_their_text
from tests.support.engines import Job, Outcome, add_job, run, scheduler_of
from tests.support.models import random_model
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, TOLERANCE, assert_same
from tests.support.stock import stock_answers
from tests.support.weight_transfer import Trainer, trainer_of

pytestmark = pytest.mark.engine(FOUR_RANKS, SPREAD_MIXTURE, COPIES, LATENT, FP8, FP8_MIXTURE)

ENGINES = {
    "test_an_update_under_way_is_as_in_stock_vllm": [FOUR_RANKS],
    "test_an_update_between_sleep_and_waking_up": [FOUR_RANKS],
    "test_what_happens_in_an_update_by_layers": [FOUR_RANKS],
    "test_methods_that_change_the_model_run_in_every_layout": [COPIES],
    "test_conversations_use_no_kv_of_old_weights": [SPREAD_MIXTURE],
    "test_requests_wait_for_the_end_of_a_transfer": [FOUR_RANKS],
    "test_a_transfer_that_fails": [FOUR_RANKS],
    "test_a_transfer_puts_in_place_first_what_was_loaded_before": [FP8],
    "test_packed_weights_refuse_an_update_and_allow_anything_else": [DENSE],
}
PLAIN: dict[str, Any] = {"worker_extension_cls": "tests.support.weight_updates.WeightUpdates"}
OLD, NEW = "qwen3", "qwen3_updated"


def batch() -> dict[str, Job]:
    rng = random.Random(0)
    return {
        f"r{i}": Job(
            [rng.randrange(3, 400) for _ in range(rng.randint(3, 60))],
            {"max_tokens": 6 + 3 * i, "temperature": 0.0, "logprobs": 0, "ignore_eos": True},
        )
        for i in range(5)
    }


class Updated:
    """An engine that gets new weights, and what stock vLLM generates with old and new ones."""

    def __init__(self, llm: Any, spec: EngineSpec) -> None:
        self.llm = llm
        self.old, self.new = spec.model, f"{spec.model}_updated"
        self.layouts = [layout.tp for layout in pat_vllm.report(llm).layouts]
        self.updates = [*UPDATES, load_fused] if spec.model == "qwen3_moe" else [*UPDATES]
        if spec is FOUR_RANKS and not vllm.__version__.startswith(("0.31", "0.32")):
            self.updates.append(transfer_named_before)
        if spec.model == "gpt_oss":  # vLLM's reload by layers leaves its experts and sinks
            self.updates = [load_all, load_one_by_one, call_function]
        close = spec.model in ("qwen3", "qwen3_next", "deepseek_v3")
        self.tolerance = TOLERANCE if close else PLAIN_TOLERANCE
        self.expected = {
            model: stock_answers(model, batch(), **PLAIN) for model in (self.old, self.new)
        }
        assert self.expected[self.old] != self.expected[self.new]

    def check(self, model: str, before_step: Callable[[int], None] = lambda step: None) -> None:
        """A batch gives what stock vLLM gives with the weights of a model."""
        assert_same(run(self.llm, batch(), before_step), self.expected[model], self.tolerance)


@pytest.fixture
def updated(llm: Any, spec: EngineSpec) -> Any:
    """The engine has the old weights, before and after."""
    updated = Updated(llm, spec)
    yield updated
    go_home(llm)
    update(llm, updated.old)


def load_all(llm: Any, model: str) -> None:
    llm.collective_rpc("load_all", args=(str(random_model(model)),))


def load_one_by_one(llm: Any, model: str) -> None:
    from safetensors.torch import load_file

    for name, weight in load_file(random_model(model) / "model.safetensors").items():
        llm.collective_rpc("load_one", args=(name, weight))


def call_function(llm: Any, model: str) -> None:
    path = str(random_model(model))
    llm.collective_rpc(lambda worker: worker.load_all(path))


def load_by_layers(llm: Any, model: str) -> None:
    llm.collective_rpc("load_by_layers", args=(str(random_model(model)),))


def reload(llm: Any, model: str) -> None:
    """By another loader than that of the start, as where that made weights up."""
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "safetensors"}},))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(random_model(model))})


def transfer(llm: Any, model: str) -> None:
    """By vLLM's four phases, in two parts."""
    trainer = trainer_of(llm)
    llm.start_weight_update()
    for part in halves(model):
        trainer.send(part)
    llm.finish_weight_update()


def halves(model: str) -> list[list[tuple[str, torch.Tensor]]]:
    """A checkpoint's weights, every other one."""
    from safetensors.torch import load_file

    weights = sorted(load_file(random_model(model) / "model.safetensors").items())
    return [weights[::2], weights[1::2]]


def transfer_named_before(llm: Any, model: str) -> None:
    """As vLLM 0.33's own trainers send weights again: they name them in the first transfer only."""
    weights = [weight for half in halves(model) for weight in half]
    trainer = trainer_of(llm)
    assert isinstance(trainer, Trainer)
    for sent, as_before in ([(n, torch.zeros_like(w)) for n, w in weights], False), (weights, True):
        llm.start_weight_update()
        trainer.send(sent, as_before)
        llm.finish_weight_update()


UPDATES = [load_all, load_one_by_one, call_function, load_by_layers, reload, transfer]


def load_fused(llm: Any, model: str) -> None:
    """The experts of a layer as one tensor each of gate and up, and of down."""
    from safetensors.torch import load_file

    whole = load_file(random_model(model) / "model.safetensors")
    fused: dict[str, torch.Tensor] = {}
    experts = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in whole if ".experts." in n)
    for name, weight in whole.items():
        layer, of_an_expert, rest = name.partition(".experts.")
        if not of_an_expert:
            fused[name] = weight
        elif rest.startswith("0."):
            gate, up, down = (
                torch.stack(
                    [whole[f"{layer}.experts.{i}.{kind}_proj.weight"] for i in range(experts)]
                )
                for kind in ("gate", "up", "down")
            )
            fused[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            fused[f"{layer}.experts.down_proj"] = down
    assert len(fused) < len(whole)
    for name, weight in fused.items():
        llm.collective_rpc("load_one", args=(name, weight))


def update(llm: Any, model: str, how: Callable[[Any, str], None] = load_all) -> None:
    how(llm, model)
    llm.reset_prefix_cache()


def test_an_update_reaches_every_layout(updated: Updated) -> None:
    """It arrives in each way, in each layout in turn, and is used in all."""
    llm, layouts = updated.llm, updated.layouts
    for i, how in enumerate(updated.updates):
        model = (updated.new, updated.old)[i % 2]
        at = layouts[-1 - i % len(layouts)]
        pat_vllm.switch(llm, tp=at)
        update(llm, model, how)
        assert pat_vllm.report(llm).layout.tp == at
        for tp in (at, *layouts):
            updated.check(model, at_steps(llm, {0: tp}))


def conversations(before: Mapping[str, Outcome], index: int) -> dict[str, Job]:
    """A turn of four conversations, after what earlier ones gave."""
    rng = random.Random(5)
    sampling = {"max_tokens": 9, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    jobs = {}
    for i in range(4):
        said = [[rng.randrange(3, 400) for _ in range(rng.randint(20, 60))] for _ in range(3)]
        prompt = list(said[0])
        for j in range(index):
            prompt += [*before[f"c{i}-{j}"].token_ids, *said[j + 1]]
        jobs[f"c{i}-{index}"] = Job(prompt, sampling, arrives=2 * i)
    return jobs


def test_conversations_use_no_kv_of_old_weights(updated: Updated) -> None:
    """Turns before and after updates that come in between, with a switch every third step.

    Each is what stock vLLM gives with the weights of its time, and so is all that stays cached.
    """
    llm, rng = updated.llm, random.Random(3)
    expected: dict[str, dict[str, Outcome]] = {updated.old: {}, updated.new: {}}
    texts: dict[str, Job] = {}
    for index in range(3):
        texts |= conversations(expected[updated.old], index)
        for model, answers in expected.items():
            answers |= stock_answers(model, conversations(expected[updated.old], index), **PLAIN)

    def before_step(step: int) -> None:
        if step % 3 == 1:
            pat_vllm.switch(llm, tp=rng.choice(updated.layouts))

    count = len(pat_vllm.report(llm).switches)
    compared = 0
    for round_, (index, model) in enumerate(
        (index, model) for index in range(3) for model in (updated.old, updated.new, updated.old)
    ):
        update(llm, model, updated.updates[round_ % len(updated.updates)])
        for _ in range(2):  # the second time from the cache
            turn = {name: job for name, job in texts.items() if name.endswith(f"-{index}")}
            outcomes = run(llm, turn, before_step)
            wanted = {name: expected[model][name] for name in turn}
            assert_same(outcomes, wanted, updated.tolerance)
        if model == updated.new:
            compared += assert_caches_hold_their_text(llm, [job.prompt for job in turn.values()])
    assert compared > 20
    assert sum(switch.cached_tokens for switch in pat_vllm.report(llm).switches[count:]) > 500


def test_nothing_that_happens_between_two_batches_leaves_stale_weights(updated: Updated) -> None:
    """Random sequences of switches, updates, sleeps of both levels, and batches with switches."""
    llm, layouts = updated.llm, updated.layouts
    models = (updated.old, updated.new)
    rng = random.Random(1)
    model = updated.old
    ways = [how for how in (load_all, transfer) if how in updated.updates]
    for _ in range(12):
        for _ in range(rng.randint(0, 4)):
            match rng.choice(("switch", "switch", "update", "update", "doze", "sleep")):
                case "switch":
                    pat_vllm.switch(llm, tp=rng.choice(layouts))
                case "update":
                    model = rng.choice(models)
                    update(llm, model, rng.choice(updated.updates))
                case "doze":
                    llm.sleep(level=1)
                    llm.wake_up()
                case "sleep":
                    model = rng.choice(models)
                    sleep_with_new_weights(llm, model, rng.choice(ways))

        def before_step(step: int) -> None:
            if rng.random() < 0.15:
                assert pat_vllm.switch(llm, tp=rng.choice(layouts))

        updated.check(model, before_step)


def test_a_transfer_puts_in_place_first_what_was_loaded_before(updated: Updated) -> None:
    """No step has used it yet. Else the next step would end the transfer, and use old weights."""
    llm = updated.llm
    trainer = trainer_of(llm)
    load_all(llm, updated.new)
    llm.start_weight_update()
    assert scheduler_of(llm).replica_set.executor.waits_for_weights()
    for part in halves(updated.old):
        trainer.send(part)
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    updated.check(updated.old)


def sleep_with_new_weights(
    llm: Any, model: str, how: Callable[[Any, str], None] = load_all
) -> None:
    """In the order of a trainer whose model shares the devices."""
    llm.sleep(level=2)
    llm.collective_rpc("lose_weights")
    llm.wake_up(["weights"])
    how(llm, model)
    llm.wake_up(["kv_cache"])


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_between_sleep_and_waking_up(updated: Updated, level: int) -> None:
    """While the engine sleeps, no switch is made."""
    llm = updated.llm
    for model, how in ((updated.new, load_all), (updated.old, transfer)):
        pat_vllm.switch(llm, tp=2)
        llm.sleep(level=level)
        llm.collective_rpc("lose_weights")
        assert not pat_vllm.switch(llm, tp=4)
        assert pat_vllm.report(llm).refused[-1].why == "the engine sleeps; wake it up first"
        llm.wake_up(["weights"])
        how(llm, model)
        llm.wake_up(["kv_cache"])
        for tp in updated.layouts:
            pat_vllm.switch(llm, tp=tp)
            updated.check(model)


# ---------------------------------------------------------------- while requests run


def generated(llm: Any) -> int | None:
    """Tokens of the engine's only request; None while its next one is being computed."""
    scheduler = scheduler_of(llm)
    active = getattr(scheduler, "replica_set", None)
    if active is not None and active.in_flight:
        return None
    schedulers = (
        [scheduler] if active is None else [replica.scheduler for replica in active.replicas]
    )
    for scheduler in schedulers:
        for request in scheduler.requests.values():
            return request.num_output_tokens
    return None


def updated_under_way(
    llm: Any, jobs: Mapping[str, Job], switches: Mapping[int, int] | None = None
) -> dict[str, Outcome]:
    """A request that gets new weights at its fifth token; `switches`: tokens generated -> tp."""
    switches = switches or {}
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

    outcomes = run(llm, jobs, before_step=before_step)
    assert seen >= {0, 5, *switches}
    return outcomes


def test_an_update_under_way_is_as_in_stock_vllm(updated: Updated) -> None:
    """Requests in flight go on with the new weights and the KV that they have."""
    jobs = dict([max(batch().items())])
    expected = stock_answers(OLD, jobs, how=updated_under_way, **PLAIN)
    for switches in ({0: 1}, {0: 4}, {0: 2, 4: 4}, {0: 4, 6: 1}, {0: 1, 5: 2, 8: 4}):
        update(updated.llm, OLD)
        assert_same(updated_under_way(updated.llm, jobs, switches), expected)


def test_what_happens_in_an_update_by_layers(updated: Updated) -> None:
    """Requests that are paused go away; others ask for layouts; the engine has nothing to do."""
    from vllm import SamplingParams

    llm = updated.llm
    core = llm.llm_engine.engine_core.engine_core
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    llm.llm_engine.add_request("goes", {"prompt_token_ids": [5, 6, 7]}, params)
    for _ in range(3):
        llm.llm_engine.step()
    assert pat_vllm.switch(llm, tp=2)
    llm.llm_engine.step()
    core.pause_scheduler("keep", clear_cache=False)
    llm.collective_rpc("begin_update")
    for half in range(2):
        assert not pat_vllm.switch(llm, tp=4)
        refused = pat_vllm.report(llm).refused[-1]
        assert "finish_weight_update" in refused.why and refused.expected
        if half == 1:
            llm.llm_engine.abort_request(["goes"], internal=False)
        llm.llm_engine.step()
        assert pat_vllm.report(llm).layout.tp == 2
        llm.collective_rpc("load_half", args=(str(random_model(NEW)), half))
    llm.collective_rpc("end_update")
    core.resume_scheduler()
    llm.reset_prefix_cache()
    for tp in (2, *updated.layouts):
        updated.check(NEW, at_steps(llm, {0: tp}))


def phases(llm: Any, model: str) -> list[Callable[[], None]]:
    """The calls of a transfer."""
    send = trainer_of(llm).send
    parts = [functools.partial(send, part) for part in halves(model)]
    return [llm.start_weight_update, *parts, llm.finish_weight_update]


def test_requests_wait_for_the_end_of_a_transfer(updated: Updated) -> None:
    """Each phase is followed by a request, a switch that is refused, and steps.

    Outputs are those of stock vLLM, whose requests wait by themselves.
    """
    llm = updated.llm
    *late, (name, job) = sorted(batch().items())
    wanted = {request: updated.expected[NEW][request] for request, _ in late}
    wanted |= stock_answers(OLD, {name: job}, how=updated_under_way, **PLAIN)
    for tp in updated.layouts:
        update(llm, OLD)
        pat_vllm.switch(llm, tp=tp)
        to_come = [*zip(phases(llm, NEW), late, strict=True)]
        steps = 0

        def before_step(step: int, to_come: list[Any] = to_come, tp: int = tp) -> None:
            nonlocal steps
            if not to_come or (len(to_come) == 4 and (step == 0 or generated(llm) != 5)):
                return
            assert generated(llm) == 5
            if len(to_come) < 4:
                assert not pat_vllm.switch(llm, tp=1 if tp != 1 else 4)
                assert "finish_weight_update" in pat_vllm.report(llm).refused[-1].why
            if steps % 3 == 0:
                call, (name, job) = to_come.pop(0)
                call()
                add_job(llm, name, job)
            steps += 1

        outcomes = run(llm, {name: job}, before_step)
        assert not to_come
        assert_same(outcomes, wanted)


def test_a_transfer_that_fails(updated: Updated) -> None:
    """The engine lives, and requests wait for the next one."""
    llm, trainer = updated.llm, trainer_of(updated.llm)
    llm.start_weight_update()
    first, _ = halves(NEW)
    trainer.send(first)
    of_no_use: dict[str, Any] = {"names": ["of no use"], "dtype_names": [], "shapes": []}
    with pytest.raises(RuntimeError, match="`dtype_names` should be of the same size"):
        llm.update_weights({"update_info": of_no_use})
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        llm.finish_weight_update()
    job = batch()["r0"]
    add_job(llm, "r0", job)
    for _ in range(5):
        llm.llm_engine.step()
    assert generated(llm) == 0
    transfer(llm, NEW)
    assert_same(run(llm, {}), {"r0": updated.expected[NEW]["r0"]})
    for tp in updated.layouts:
        updated.check(NEW, at_steps(llm, {0: tp}))


# ---------------------------------------------------------------- what is not an update of weights


def test_methods_that_change_the_model_run_in_every_layout(updated: Updated) -> None:
    llm = updated.llm
    token = next(iter(updated.expected[OLD].values())).token_ids[0]
    llm.collective_rpc("forbid_token", args=(token,))
    outcomes = []
    for tp in updated.layouts:
        pat_vllm.switch(llm, tp=tp)
        outcomes.append(run(llm, batch()))
        assert all(token not in outcome.token_ids for outcome in outcomes[-1].values())
        assert_same(outcomes[-1], outcomes[0])
    llm.collective_rpc("allow_token")
    updated.check(OLD)


def test_packed_weights_refuse_an_update_and_allow_anything_else(llm: Any) -> None:
    """What vLLM makes of linear weights on CPU cannot be derived from."""
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
