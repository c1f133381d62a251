"""OpenRLHF's own REINFORCE loop over PAT, on CPU: weights' other ways, sleep, faults, learning."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.nightly.openrlhf.images import write_model, write_prompts
from tests.openrlhf.training import COLOCATED, IN_SYNC, SWITCHING, assert_trained, training
from tests.support.random_models import make_model

pytest.importorskip("openrlhf", reason="make test-openrlhf")
pytestmark = pytest.mark.timeout(2400)

DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
THREE_STEPS = ("--data.max_samples", "24")
"""Of the four of the example, each of 8 prompts."""


def test_colocated_over_multiprocessing(tmp_path: Path) -> None:
    """Hybrid engine: one placement for both sides, CUDA IPC, and sleep at every change of sides.

    The layouts share one copy of the weights, as on GPUs, and the engine speculates.
    """
    pat = {**SWITCHING, "launcher": "mp", "weights": "inplace"}
    # Flat as the example's, but for a phrase that it repeats: drafts are accepted.
    make_model(tmp_path / "model", layers=2, gain=0.5, repeat=6.0, dtype="bfloat16")
    model = ("--actor.model_name_or_path", str(tmp_path / "model"))
    drafts = ("--vllm.speculative_config", json.dumps(DRAFTS))
    with training(*COLOCATED, *model, *drafts, pat=pat) as run:
        assert_trained(run)
        counts = [re.findall(r"(\d+) of (\d+) draft tokens accepted", o) for o in run.rollouts]
        shares = [int(accepted) / int(drafted) for ((accepted, drafted),) in counts]
        # Training soon makes the phrase certain, or breaks it.
        assert any(0.1 < share < 0.9 for share in shares), shares


def test_colocated_over_ray() -> None:
    with training(*COLOCATED) as run:
        assert_trained(run, over_ray=True)


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"layers": 2},
    # And linear attention in two layers of three.
    "qwen3_next": {"layers": 3, "heads": 4, "head_dim": 128},
}


@pytest.mark.parametrize("arch", MIXTURES)
def test_a_mixture_of_experts(arch: str, tmp_path: Path) -> None:
    """Experts whole in replicas, spread in the group. New weights come to both."""
    policy = {"kind": "schedule", "switch_at": {"12": 2}}
    pat = {"policy": policy, "launcher": "mp", "weights": "inplace", "experts": "ep"}
    make_model(tmp_path / "model", arch=arch, gain=0.5, dtype="bfloat16", **MIXTURES[arch])
    model = ("--actor.model_name_or_path", str(tmp_path / "model"))
    with training(*model, *THREE_STEPS, pat=pat) as run:
        run.succeed()
        # In bfloat16 a router may prefer another expert, where two are alike.
        assert max(abs(step["vllm_kl"]) for step in run.steps) < 10 * IN_SYNC, run.steps
        assert len(run.steps) == len(run.rollouts) == 3
        assert all("tp1dp2 -> tp2dp1" in line for line in run.rollouts), run.rollouts
        run.leaves_nothing()


@pytest.mark.parametrize("arch", ["nemotron_h", "qwen3_5_text"])
def test_linear_attention(arch: str, tmp_path: Path) -> None:
    """Dense models: Mamba2, and Gated DeltaNet of a text model alone."""
    shape = {"arch": arch, "layers": 4, "heads": 4, "head_dim": 128}
    make_model(tmp_path / "model", gain=0.5, dtype="bfloat16", **shape)
    model = ("--actor.model_name_or_path", str(tmp_path / "model"))
    pat = {**SWITCHING, "weights": "inplace"}
    with training(*model, *THREE_STEPS, pat=pat) as run:
        assert_trained(run, steps=3, over_ray=True)


AGENTS = (
    *("--train.agent_func_path", str(Path(__file__).with_name("two_turns.py"))),
    *("--data.max_len", "256", "--vllm.enable_prefix_caching", "--actor.freeze_visual_encoder"),
)


@pytest.mark.parametrize("agents", [False, True])
def test_images(agents: bool, tmp_path: Path) -> None:
    """The second step has the images of the first. OpenRLHF resets no cache of the tower's, whose
    weights change; those that are frozen it does not send."""
    arguments = (
        *("--actor.model_name_or_path", str(write_model(tmp_path / "model"))),
        *("--data.prompt_dataset", str(write_prompts(tmp_path / "prompts.jsonl", 8))),
        *("--data.max_images_per_prompt", "3", "--train.num_episodes", "2"),
        *(AGENTS if agents else ()),
    )
    with training(*arguments, pat={**SWITCHING, "weights": "inplace"}) as run:
        assert_trained(run, steps=2, over_ray=True)
        assert "Qwen2_5_VLForConditionalGeneration" in run.output
        assert not agents or [step["turns"] for step in run.steps] == [2, 2]


def test_separated_over_multiprocessing_then_a_killed_worker() -> None:
    """Killed in a rollout: the trainer fails, says why, and leaves nothing behind."""
    # Steps enough for a rollout to follow, also where the trainer runs ahead of this process.
    episodes = ("--train.num_episodes", "3")
    with training(*episodes, pat={**SWITCHING, "launcher": "mp"}) as run:
        run.wait_for_text("Global step", times=3)
        assert run.in_sync()[:3] == [True] * 3, run.steps
        # In the middle of the next rollout, which cannot end before the worker is killed.
        run.wait_for_text("(policy)", times=run.output.count("(policy)") + 1)
        worker = run.processes("VLLM::Worker")[0]
        worker.suspend()
        time.sleep(2)
        worker.kill()
        assert run.child.wait() != 0
        assert "the PAT engine died during a rollout" in run.tail(), run.tail()
        run.leaves_nothing()


def test_the_predictor_learns_from_step_to_step() -> None:
    """It keeps what it learns, and knows samples of a prompt that are sent one by one."""
    agent = Path(__file__).with_name("agent.py")
    # The agent's limit of a response is to count as its natural end.
    pat: dict[str, Any] = {"policy": {"kind": "predictor", "length_bound": 200}}
    arguments = ("--train.agent_func_path", str(agent), "--data.max_len", "400")
    with training(*arguments, pat=pat) as run:
        run.succeed()
        assert run.in_sync() == [True] * 4, run.steps
        lines = [
            re.search(r"learnt from (\d+) responses in (\d+) batches", line)
            for line in run.rollouts
        ]
        learnt = [(int(match[1]), int(match[2])) for match in lines if match]
        assert learnt == [(32 * step, step) for step in range(1, 5)], run.rollouts


def test_partial_rollouts() -> None:
    """Weights arrive in the middle of a rollout, which computes its KV again and goes on."""
    partial = ("--train.async_enable", "--train.partial_rollout_enable", "--data.max_len", "400")
    with training(*partial, *THREE_STEPS) as run:
        run.succeed()
        assert len(run.steps) == 3 and all(run.switches()), run.rollouts
        # Of the weights at the start; every later one mixes old weights and new.
        assert run.in_sync()[0], run.steps
