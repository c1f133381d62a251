"""verl's `mtp.enable_rollout` in its GRPO trainer."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from tests.nightly.verl.test_grpo import IN_PLACE, SCHEDULE
from tests.nightly.verl.trainer import grpo
from tests.support.v2_on_cpu.v2_on_cpu import VARIABLES
from tests.verl.models import mtp_chat
from tests.verl.test_mtp import MTP

pytestmark = pytest.mark.timeout(2400)


def test_two_steps_of_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's FSDP actor has no MTP module, so that the rollout's stays that of the checkpoint. Its
    Megatron actor, which has one, needs GPUs."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    model = {"path": mtp_chat(), **MTP}
    options = [f"actor_rollout_ref.model.{name}={value}" for name, value in model.items()]
    options += ["actor_rollout_ref.rollout.load_format=auto", "trainer.total_training_steps=2"]
    with grpo(SCHEDULE, *IN_PLACE, *options) as run:
        run.succeed()
        assert len(run.rollouts()) == len(run.steps()) == 2
        for step, rollout in zip(run.steps(), run.rollouts(), strict=True):
            assert step.probs_diff_max < 1e-4
            assert "tp1dp2 -> tp2dp1" in rollout and "draft tokens accepted" in rollout
        assert "none for its drafter" in run.output
        run.leaves_nothing()
