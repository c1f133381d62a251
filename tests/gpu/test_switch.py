"""Switches on GPUs: what is generated across them is what the static layouts would have said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import pat_vllm

pytestmark = pytest.mark.gpu

SLACK = 2e-3
"""Beyond the noise of the layouts themselves: log-probabilities of 16-bit floats."""


def batch(tokens: int = 48) -> dict[str, Any]:
    """Greedy and seeded requests, half of whose prompts repeat a phrase."""
    from tests.support.engines import Job

    rng = random.Random(0)
    jobs = {}
    for i in range(12):
        prompt = [rng.randrange(20, 400) for _ in range(rng.randint(8, 120))]
        prompt = prompt[:8] * 6 if i % 3 == 0 else prompt
        sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
        sampling |= {"max_tokens": tokens + 2 * i, "ignore_eos": True, "logprobs": 0}
        jobs[f"r{i}"] = Job(prompt, sampling)
    return jobs


def at_steps(llm: Any, actions: Mapping[int, Callable[[], object]]) -> Callable[[int], None]:
    def before_step(step: int) -> None:
        if step in actions:
            actions[step]()

    return before_step


def scores(llm: Any, tp: int, outcomes: Mapping[str, Any], jobs: Mapping[str, Any]) -> Any:
    """Log-probabilities that the layout of this tp gives to generated tokens."""
    from tests.support.engines import teacher_forced

    assert pat_vllm.switch(llm, tp=tp)
    return teacher_forced(
        llm, {name: (jobs[name].prompt, outcome.token_ids) for name, outcome in outcomes.items()}
    )


def apart(some: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """The largest difference of log-probabilities."""
    return max(abs(a - b) for name in some for a, b in zip(some[name], others[name], strict=True))


def check(llm: Any, outcomes: Mapping[str, Any], jobs: Mapping[str, Any]) -> None:
    """No token is lost, and each was as likely as one of the static layouts says.

    The layouts' own noise, between themselves, is the measure.
    """
    assert outcomes.keys() == jobs.keys()
    for name, outcome in outcomes.items():
        assert len(outcome.token_ids) == jobs[name].sampling["max_tokens"], name
    layouts = [scores(llm, tp, outcomes, jobs) for tp in (1, 2)]
    sampled = {name: outcome.logprobs for name, outcome in outcomes.items()}
    for name, logprobs in sampled.items():
        for own, *said in zip(logprobs, *(layout[name] for layout in layouts), strict=True):
            assert min(abs(own - other) for other in said) <= 2 * apart(*layouts) + SLACK, name


@pytest.mark.parametrize("way", ["migrate", "recompute"])
def test_every_ordered_pair_of_layouts(llm: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with CUDA graphs, in mid-generation."""
    from tests.support.engines import run, scheduler_of

    assert not llm.llm_engine.vllm_config.model_config.enforce_eager
    monkeypatch.setattr(scheduler_of(llm).controller.costs, "mode", way)
    for source, target in itertools.permutations((1, 2), 2):
        jobs = batch()
        count = len(pat_vllm.report(llm).switches)
        actions = {
            0: lambda tp=source: pat_vllm.switch(llm, tp=tp),
            12: lambda tp=target: pat_vllm.switch(llm, tp=tp),
        }
        outcomes = run(llm, jobs, before_step=at_steps(llm, actions))
        (switch,) = [s for s in pat_vllm.report(llm).switches[count:] if s.num_seqs]
        carried = switch.migrated if way == "migrate" else switch.recomputed
        assert (switch.source.tp, switch.target.tp) == (source, target) and carried > 0
        check(llm, outcomes, jobs)


def test_drafts_across_switches(llm: Any) -> None:
    """`ngram_gpu`, with switches while drafts are verified."""
    from tests.support.engines import run

    jobs = batch(96)
    before = pat_vllm.report(llm).drafts
    actions = {
        0: lambda: pat_vllm.speculate(llm, 4),
        10: lambda: pat_vllm.switch(llm, tp=2),
        25: lambda: pat_vllm.switch(llm, tp=1),
    }
    outcomes = run(llm, jobs, before_step=at_steps(llm, actions))
    pat_vllm.speculate(llm, None)
    samples = pat_vllm.report(llm).drafts[len(before) :]
    assert sum(sample.drafted for sample in samples) > 0
    assert sum(sample.accepted for sample in samples) > 0
    check(llm, outcomes, jobs)


def send_by_ipc(llm: Any, model: str) -> None:
    """New weights from this process's memory on each device, as colocated trainers send them."""
    import torch
    from safetensors.torch import load_file
    from torch.multiprocessing.reductions import reduce_tensor

    from tests.support.models import random_model

    path = random_model(model) / "model.safetensors"
    handles, kept = {}, []
    for device in range(min(2, torch.cuda.device_count())):
        weights = load_file(path, device=f"cuda:{device}")
        kept.append(weights)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handles[uuid] = [(name, reduce_tensor(weight)) for name, weight in weights.items()]
    torch.cuda.synchronize()
    llm.collective_rpc(load_by_ipc, args=(handles,))
    del kept


def load_by_ipc(worker: Any, handles: dict[str, list[Any]]) -> None:
    """Runs in a worker: maps the weights that lie on its device, and loads them."""
    import torch

    index = worker.device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)

    def weights() -> Any:
        for name, (rebuild, arguments) in handles[uuid]:
            arguments = list(arguments)
            arguments[6] = index  # the device's number in this process
            yield name, rebuild(*arguments)

    worker.model_runner.model.load_weights(weights())
    torch.cuda.synchronize()


def likelihood(llm: Any, tp: int) -> Any:
    """What a layout says of fixed texts: tells weights apart."""
    from tests.support.engines import Outcome

    jobs = batch()
    outcomes = {name: Outcome(token_ids=job.prompt[::-1]) for name, job in jobs.items()}
    return scores(llm, tp, outcomes, jobs)


def test_an_update_by_ipc_reaches_every_layout(llm: Any) -> None:
    before = {tp: likelihood(llm, tp) for tp in (1, 2)}
    noise = apart(before[1], before[2])
    assert pat_vllm.switch(llm, tp=2)
    send_by_ipc(llm, "wide_updated")
    llm.reset_prefix_cache()
    after = {tp: likelihood(llm, tp) for tp in (2, 1)}
    assert apart(after[1], after[2]) <= 2 * noise + SLACK
    assert apart(after[1], before[1]) > 10 * (noise + SLACK), "the weights are the old ones"
    send_by_ipc(llm, "wide")
    llm.reset_prefix_cache()
    for tp in (1, 2):
        assert apart(likelihood(llm, tp), before[tp]) <= noise + SLACK


def test_sleep_at_level_2_and_new_weights(llm: Any) -> None:
    """Weights and KV are given back; what is loaded on waking up serves every layout."""
    from tests.support.engines import run

    before = {tp: likelihood(llm, tp) for tp in (1, 2)}
    noise = apart(before[1], before[2])
    assert pat_vllm.switch(llm, tp=2)
    llm.sleep(level=2)
    assert not pat_vllm.switch(llm, tp=1)
    llm.wake_up(["weights"])
    send_by_ipc(llm, "wide")
    llm.wake_up(["kv_cache"])
    for tp in (2, 1):
        assert apart(likelihood(llm, tp), before[tp]) <= noise + SLACK
    jobs = batch()
    actions = {8: lambda: pat_vllm.switch(llm, tp=2), 16: lambda: pat_vllm.switch(llm, tp=1)}
    check(llm, run(llm, jobs, before_step=at_steps(llm, actions)), jobs)
