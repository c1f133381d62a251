"""Switches on GPUs: what is generated across them is what the static layouts would have said."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

import pat_vllm
from tests.gpu.conftest import MODELS, RANKS
from tests.support.models import random_model

pytestmark = pytest.mark.gpu
EVERY = pytest.mark.parametrize("llm", MODELS, indirect=True, scope="session")
DENSE = pytest.mark.parametrize("llm", ["dense"], indirect=True, scope="session")

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
    said = teacher_forced(
        llm, {name: (jobs[name].prompt, outcome.token_ids) for name, outcome in outcomes.items()}
    )
    assert all(math.isfinite(logprob) for of_job in said.values() for logprob in of_job)
    return said


def sizes(llm: Any) -> list[int]:
    """Tensor parallelism of the engine's layouts, each once."""
    return sorted({layout.tp for layout in pat_vllm.report(llm).layouts})


def apart(some: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """The largest difference of log-probabilities."""
    return max(abs(a - b) for name in some for a, b in zip(some[name], others[name], strict=True))


def noise_of(layouts: Sequence[Mapping[str, Any]]) -> float:
    """How far layouts are apart by themselves."""
    return max(apart(*pair) for pair in itertools.combinations(layouts, 2))


def check(llm: Any, outcomes: Mapping[str, Any], jobs: Mapping[str, Any]) -> None:
    """No token is lost, and each was as likely as one of the static layouts says.

    The layouts' own noise, between themselves, is the measure.
    """
    assert outcomes.keys() == jobs.keys()
    for name, outcome in outcomes.items():
        assert len(outcome.token_ids) == jobs[name].sampling["max_tokens"], name
    layouts = [scores(llm, tp, outcomes, jobs) for tp in sizes(llm)]
    allowed = 2 * noise_of(layouts) + SLACK
    sampled = {name: outcome.logprobs for name, outcome in outcomes.items()}
    for name, logprobs in sampled.items():
        for own, *said in zip(logprobs, *(layout[name] for layout in layouts), strict=True):
            assert min(abs(own - other) for other in said) <= allowed, name


def on_default_stream(worker: Any) -> bool:
    """Runs in a worker."""
    import torch

    return bool(torch.cuda.current_stream() == torch.cuda.default_stream())


@DENSE
def test_workers_have_a_stream_of_their_own(llm: Any) -> None:
    """As every engine with NCCL: else all work would be in one order by itself."""
    assert not any(llm.collective_rpc(on_default_stream))


@EVERY
@pytest.mark.parametrize("way", ["migrate", "recompute"])
def test_every_ordered_pair_of_layouts(llm: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with CUDA graphs, in mid-generation."""
    from tests.support.engines import run, scheduler_of

    assert not llm.llm_engine.vllm_config.model_config.enforce_eager
    monkeypatch.setattr(scheduler_of(llm).controller.costs, "mode", way)
    for source, target in itertools.permutations(sizes(llm), 2):
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


@EVERY
def test_nobody_reads_the_null_block(llm: Any) -> None:
    """What a kernel may load and masks, it must not multiply."""
    from tests.support.engines import run
    from tests.support.null_blocks import spoil_null_blocks

    def enter(tp: int) -> None:
        assert pat_vllm.switch(llm, tp=tp)
        spoil_null_blocks(llm)

    for source, target in itertools.permutations(sizes(llm), 2):
        jobs = batch()
        actions = {0: partial(enter, source), 12: partial(enter, target)}
        check(llm, run(llm, jobs, before_step=at_steps(llm, actions)), jobs)


@DENSE
def test_drafts_across_switches(llm: Any) -> None:
    """`ngram_gpu`, with switches while drafts are verified."""
    from tests.support.engines import run

    jobs = batch(96)
    before = pat_vllm.report(llm).drafts
    actions = {
        0: lambda: pat_vllm.speculate(llm, 4),
        10: lambda: pat_vllm.switch(llm, tp=sizes(llm)[-1]),
        25: lambda: pat_vllm.switch(llm, tp=1),
    }
    outcomes = run(llm, jobs, before_step=at_steps(llm, actions))
    pat_vllm.speculate(llm, None)
    samples = pat_vllm.report(llm).drafts[len(before) :]
    assert sum(sample.counts.drafted for sample in samples) > 0
    assert sum(sample.counts.accepted for sample in samples) > 0
    check(llm, outcomes, jobs)


def exported(model: str) -> tuple[dict[str, list[Any]], list[Any]]:
    """A checkpoint's weights in this process's memory on each device, as colocated trainers hold
    them: by the device, names and what opens them; and the weights, to be kept."""
    import torch
    from safetensors.torch import load_file
    from torch.multiprocessing.reductions import reduce_tensor

    path = random_model(model) / "model.safetensors"
    handles, kept = {}, []
    for device in range(min(RANKS, torch.cuda.device_count())):
        weights = load_file(path, device=f"cuda:{device}")
        kept.append(weights)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handles[uuid] = [(name, reduce_tensor(weight)) for name, weight in weights.items()]
    torch.cuda.synchronize()
    return handles, kept


def send_by_ipc(llm: Any, model: str) -> None:
    """By a function of the trainer's."""
    handles, kept = exported(model)
    llm.collective_rpc(load_by_ipc, args=(handles,))
    del kept


def send_in_phases(llm: Any, model: str) -> None:
    """By vLLM's own transfer, layer by layer."""
    from tests.support.weight_transfer import described

    handles, kept = exported(model)
    arguments = [[of_weight for _, (_, of_weight) in weights] for weights in handles.values()]
    of_weights = [
        dict(zip(handles, of_one, strict=True)) for of_one in zip(*arguments, strict=True)
    ]
    llm.init_weight_transfer_engine({"init_info": {"packed": False}})
    llm.start_weight_update()
    info = described(list(kept[0].items())) | {"ipc_handles": of_weights}
    llm.update_weights({"update_info": info})
    llm.finish_weight_update()
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


@DENSE
@pytest.mark.parametrize("send", [send_by_ipc, send_in_phases])
def test_an_update_by_ipc_reaches_every_layout(llm: Any, send: Callable[..., None]) -> None:
    """Whichever is in use when it comes."""
    before = {tp: likelihood(llm, tp) for tp in sizes(llm)}
    noise = noise_of(list(before.values()))
    for in_use in before:
        assert pat_vllm.switch(llm, tp=in_use)
        send(llm, "wide_updated")
        llm.reset_prefix_cache()
        after = {tp: likelihood(llm, tp) for tp in reversed(before)}
        assert noise_of(list(after.values())) <= 2 * noise + SLACK
        assert apart(after[1], before[1]) > 10 * (noise + SLACK), "the weights are the old ones"
        send(llm, "wide")
        llm.reset_prefix_cache()
        for tp in before:
            assert apart(likelihood(llm, tp), before[tp]) <= noise + SLACK


@DENSE
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_switches_after_it(llm: Any, level: int) -> None:
    """KV is given back, at level 2 weights as well; what is loaded on waking up serves every
    layout."""
    from tests.support.engines import run

    before = {tp: likelihood(llm, tp) for tp in sizes(llm)}
    noise = noise_of(list(before.values()))
    assert pat_vllm.switch(llm, tp=sizes(llm)[-1])
    llm.sleep(level=level)
    assert not pat_vllm.switch(llm, tp=1)
    llm.wake_up(["weights"])
    if level == 2:
        send_by_ipc(llm, "wide")
    llm.wake_up(["kv_cache"])
    for tp in reversed(before):
        assert apart(likelihood(llm, tp), before[tp]) <= noise + SLACK
    jobs, widest = batch(), sizes(llm)[-1]
    actions = {8: lambda: pat_vllm.switch(llm, tp=widest), 16: lambda: pat_vllm.switch(llm, tp=1)}
    check(llm, run(llm, jobs, before_step=at_steps(llm, actions)), jobs)
