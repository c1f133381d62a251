"""Batches modelled in a moment against the simulator, which plays every step by vLLM's rules."""

from __future__ import annotations

from typing import Any

import pytest

from pat_vllm.advice.advise_options import AdviseOptions
from pat_vllm.advice.rollouts import rollouts_of
from pat_vllm.advice.simulations import Config, Task, replay_chain
from pat_vllm.layout import Layout
from pat_vllm.modelled.batch_time import Load, batch_seconds
from pat_vllm.modelled.roofline import Machine
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.gpus import GPUS


@pytest.mark.parametrize(
    ("model", "gpu", "per_gpu", "shape"),
    [
        ("llama-3.1-8b", "A40", 8, "deepscaler"),
        ("qwen3-14b", "A40", 64, "uniform"),
        ("qwen3-14b", "A40", 256, "alike"),
    ],
)
def test_static_layouts_take_as_long_as_the_simulator_says(
    model: str, gpu: str, per_gpu: int, shape: str
) -> None:
    """Whether KV is short or not; the simulator adds noise, of 2 % in the mean."""
    rollouts = rollouts_of(
        AdviseOptions(model, gpu, 8, responses=8 * per_gpu, shape=shape, max_tokens=4096)
    )
    machine = _machine(model, gpu)
    for layout in rollouts.static.layouts:
        run, *_ = replay_chain(rollouts, Task(Config(layout), 0))
        seconds = batch_seconds(
            machine,
            [layout],
            rollouts.static.kv_tokens,
            rollouts.static.max_num_seqs,
            Load.of(rollouts.chains[0][1]),
        )
        assert seconds == pytest.approx(run.seconds, rel=0.15), layout


def test_with_drafts_the_slowest_of_equal_responses_ends_the_batch() -> None:
    """As with the best fixed draft length. Were drafts accepted alike, it would take a fifth
    less."""
    options = AdviseOptions(
        "qwen3-30b-a3b", "A40", 8, responses=512, shape="alike", max_tokens=16384, acceptance=0.5
    )
    rollouts = rollouts_of(options)
    lengths = (0, 1, 2, 4)
    for layout in rollouts.static.layouts[:2]:
        configs = [Config(layout, f"k = {k}") for k in lengths[1:]]
        runs = [replay_chain(rollouts, Task(config, 0, screening=True))[0] for config in configs]
        seconds = batch_seconds(
            _machine("qwen3-30b-a3b", "A40"),
            [layout],
            rollouts.static.kv_tokens,
            rollouts.static.max_num_seqs,
            Load.of(rollouts.chains[0][1]),
            lengths,
        )
        assert seconds == pytest.approx(min(run.seconds for run in runs), rel=0.1), layout


def test_a_batch_switches_where_that_saves_time() -> None:
    machine, load = _machine("llama-3.1-8b", "A40"), Load(512, [400] * 63 + [8000])
    narrow, wide = Layout(1, 8), Layout(8, 1)

    def seconds(*layouts: Layout, **room: int) -> float:
        kv = {1: 400_000, 8: 4_000_000} | {int(tp[2:]): room[tp] for tp in room}
        return batch_seconds(machine, layouts, kv, dict.fromkeys(kv, 1024), load)

    alone = [seconds(layout) for layout in (narrow, wide)]
    assert seconds(narrow, wide) < min(alone)
    # The same layouts, with less memory.
    assert seconds(narrow, tp1=9_000) > alone[0]


def test_shares_of_lengths() -> None:
    machine = _machine("llama-3.1-8b", "H100")
    of: Any = {"machine": machine, "layouts": [Layout(8, 1)], "kv_tokens": {8: 10**9}}
    few, all_ = (
        batch_seconds(**of, max_num_seqs={8: 1024}, load=Load(64, lengths))
        for lengths in ([100, 1000], [100, 1000] * 32)
    )
    assert few == all_


def _machine(model: str, gpu: str) -> Machine:
    return Machine(ModelSize.of(MODEL_SHAPES[model], 2), GPUS[gpu])
