"""verl's `rollout.quantization=fp8` against verl's own rollout, and in its GRPO trainer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

from tests.nightly.verl.test_grpo import IN_PLACE as GRPO_IN_PLACE
from tests.nightly.verl.test_grpo import SCHEDULE
from tests.nightly.verl.trainer import grpo
from tests.verl.models import BLOCKS, few_tokens, small_chat
from tests.verl.reference import CLOSE
from tests.verl.servers import server
from tests.verl.test_classes import IN_PLACE
from tests.verl.test_server import PROMPTS, in_layout

pytestmark = pytest.mark.timeout(2400)

FP8: dict[str, Any] = {"quantization": "fp8", "load_format": "dummy"}


@pytest.fixture(autouse=True)
def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_on_cpu,verl_fp8_on_cpu")


def test_as_in_stock_rollouts() -> None:
    """Of verl, with stock vLLM at each layout's tp."""
    old, new = (few_tokens("qwen3", seed, **BLOCKS) for seed in range(2))
    stock = {}
    for tp in (1, 2):
        with server(old, name="vllm", tp=tp, **FP8) as own:
            own.do(own.push(new, 1))
            stock[tp] = own.generate_all(PROMPTS, max_tokens=24)
    with server(old, *IN_PLACE, **FP8) as pat:
        pat.do(pat.push(new, 1))
        for tp, expected in stock.items():
            for response, other in zip(in_layout(pat, tp), expected, strict=True):
                assert response.token_ids == other.token_ids
                assert response.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


def test_two_steps_of_grpo() -> None:
    """The actor is not quantized, so that its probabilities differ from the rollout's."""
    model = f"actor_rollout_ref.model.path={small_chat('llama', **BLOCKS)}"
    quantized = "actor_rollout_ref.rollout.quantization=fp8"
    steps = "trainer.total_training_steps=2"
    with grpo(SCHEDULE, *GRPO_IN_PLACE, model, quantized, steps) as run:
        run.succeed()
        assert len(run.rollouts()) == len(run.steps()) == 2
        for step, rollout in zip(run.steps(), run.rollouts(), strict=True):
            assert 1e-5 < step.probs_diff_max < 0.2
            assert "tp1dp2 -> tp2dp1" in rollout
        run.leaves_nothing()
