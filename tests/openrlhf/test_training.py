"""OpenRLHF's own REINFORCE loop over PAT, on CPU: `make test-openrlhf`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.openrlhf.training import IN_SYNC, SWITCHING, assert_trained, training
from tests.support.random_models import make_model

pytest.importorskip("openrlhf", reason="make test-openrlhf")
pytestmark = pytest.mark.timeout(2400)


def test_separated_over_ray() -> None:
    """The example, two steps of it: a regroup in each rollout, and new weights in the second."""
    with training("--data.max_samples", "16") as run:
        assert_trained(run, steps=2, over_ray=True)
        assert "Qwen3ForCausalLM" in run.output


WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"tie": True, "heads": 4, "kv_heads": 2},
    "gpt_oss": {"heads": 8, "kv_heads": 4, "layers": 2, "expert_intermediate": 128},
}


@pytest.mark.parametrize("arch", WINDOWS)
def test_sliding_windows(arch: str, tmp_path: Path) -> None:
    """Responses are longer than the windows, and new weights come between two steps."""
    shape = WINDOWS[arch] | {"arch": arch, "window": 40}
    make_model(tmp_path / "model", gain=0.5, dtype="bfloat16", **shape)
    model = ("--actor.model_name_or_path", str(tmp_path / "model"))
    # Copies of experts cannot be updated on CPU, where vLLM packs them.
    pat = {**SWITCHING, "weights": "inplace"} if arch == "gpt_oss" else SWITCHING
    with training(*model, "--data.max_samples", "16", pat=pat) as run:
        assert_trained(run, steps=2, over_ray=True)


def test_agents() -> None:
    """The example's calculator, two steps over the same prompts: turns find their KV.

    The engine switches within each turn, and back while all trajectories wait for the next.
    """
    agent = ("--train.agent_func_path", str(Path(__file__).with_name("agent.py")))
    prompts = ("--data.max_samples", "8", "--train.num_episodes", "2", "--data.max_len", "640")
    single = ("--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8")
    cached = ("--vllm.enable_prefix_caching",)
    # Tiny models' prefixes are computed again as fast as they are moved.
    pat = {"policy": {"kind": "schedule", "switch_at": {"4": 2}}, "kv_transfer": "migrate"}
    with training(*agent, *prompts, *single, *cached, pat=pat) as run:
        # Rounding is up to 8e-4 with stock vLLM, 1.02e-3 in a static layout; old weights are 0.2.
        assert_trained(run, steps=2, over_ray=True, bound=5 * IN_SYNC)
        for step, rollout in zip(run.steps, run.rollouts, strict=True):
            assert step["turns"] == 3
            assert step["later_cached"] == step["later_expected"] > 0
            # The second step's prompts are the first one's: nothing of old weights is found.
            assert step["first_cached"] == 0
            live = re.findall(r"tp1dp2 -> tp2dp1 at \S+ s, (\d) live", rollout)
            assert len(live) >= 3 and all(1 <= int(number) <= 4 for number in live), rollout
