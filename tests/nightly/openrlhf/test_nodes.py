"""Engines on two nodes of a Ray cluster, under OpenRLHF's own dispatch and trainer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.openrlhf.training import ROOT, SWITCHING
from tests.support.engines import engine_processes
from tests.support.random_models import make_model
from tests.support.ray_nodes import GONE_WITHIN, assert_gone, ray_nodes

pytest.importorskip("openrlhf", reason="make test-openrlhf")
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(2400)

STAND_INS = ROOT / "tests" / "support" / "openrlhf_on_cpu"
ENVIRONMENT: dict[str, Any] = {
    "PYTHONPATH": os.pathsep.join(
        [str(STAND_INS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "DS_ACCELERATOR": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
"""Of Ray's processes: what the example exports, and what the tests set besides."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A node for the trainer, and two for an engine of two ranks each."""
    with ray_nodes(1, 2, 2, **ENVIRONMENT) as address:
        yield address


def generator_over(engines: list[Any], model: Path) -> Any:
    """OpenRLHF's dispatch of prompts to engines."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from transformers import AutoTokenizer

    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level="off")),
        rollout=SimpleNamespace(n_samples_per_prompt=2),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    return SamplesGenerator(SimpleNamespace(args=args), None, None, tokenizer, engines)


def rollout(generator: Any, prompts: int, tokens: int) -> list[Any]:
    """Two responses to each prompt, all of the same length."""
    batch = [f"prompt {index}" for index in range(prompts)]
    batches = iter([(None, batch, [""] * prompts, [None] * prompts)])
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "max_len": 2048}
    samples, _, _ = generator._generate_vllm(batches, prompts, False, **limits)
    return samples


def test_prompts_are_spread_and_a_dead_engine_is_named(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openrlhf.trainer.ray import vllm_engine
    from pat_openrlhf import engines as engines_module
    from pat_openrlhf.options import EngineOptions

    from tests.nightly.openrlhf.watched import WatchedActor

    before = engine_processes()
    model = tmp_path / "model"
    make_model(model, layers=2, dtype="bfloat16")
    options = EngineOptions({**SWITCHING}, num_engines=2)
    monkeypatch.setattr(engines_module, "PatRolloutActor", WatchedActor)
    monkeypatch.setattr(vllm_engine, "RolloutRayActor", engines_module.PatEngines(options))
    engines = vllm_engine.create_vllm_engines(
        2, 2, str(model), 1, False, False, True, 2048, gpu_memory_utilization=0.3
    )

    generator = generator_over(engines, model)
    assert len(rollout(generator, 16, 40)) == 32
    places = ray.get([engine.place.remote() for engine in engines])
    gpus = {node["NodeID"]: node["Resources"].get("GPU") for node in ray.nodes()}
    for place in places:
        (node,) = place.nodes
        assert gpus[node] == 2
        assert place.responses == 16
    assert places[0].nodes != places[1].nodes
    layouts = ray.get([engine.layout_in_metrics.remote() for engine in engines])
    assert layouts == [(1, 2), (1, 2)]

    # An engine without its actor: its rollout cannot end before that.
    victim = [psutil.Process(pid) for pid in (places[1].core, *places[1].ranks)]
    victim[-1].suspend()
    threading.Timer(3, lambda: [process.kill() for process in victim]).start()
    with pytest.raises(ray.exceptions.RayTaskError, match="the PAT engine died during a rollout"):
        rollout(generator, 16, 400)
    assert not psutil.wait_procs(victim, timeout=GONE_WITHIN)[1]

    # An actor: its engine ends with it.
    psutil.Process(places[0].actor).kill()
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(engines[0].get_num_unfinished_requests.remote(), timeout=GONE_WITHIN)
    ray.kill(engines[1].actor)
    assert_gone(before)
