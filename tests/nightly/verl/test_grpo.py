"""verl's real GRPO trainer, the example of the docs, with the layout changing in each rollout.

In float32 the probabilities that the rollout and the actor give to the same tokens differ by
rounding only, unless a weight that the rollout used was not the actor's.
"""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import pandas as pd

from tests.nightly.verl.trainer import EXAMPLE, GRPO, grpo
from tests.support.vision import data_of
from tests.verl.models import mixture_chat, pictured_chat, repeating_chat, small_chat

pytestmark = pytest.mark.timeout(2400)

PAT = "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.pat"
SCHEDULE = f"{PAT}.policy={{kind:schedule,switch_at:{{4:2}}}}"
VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=pat",
)
DRAFTS = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config="
    "{method:ngram,num_speculative_tokens:4,prompt_lookup_min:2,prompt_lookup_max:4}"
)


def check_steps(run: GRPO, tolerance: float = 1e-5, long_tail: bool = True) -> None:
    """Three steps were made, with a regroup in each rollout and the actor's weights in each."""
    steps, rollouts = run.steps()[:3], run.rollouts()[:3]
    assert len(steps) == len(rollouts) == 3
    for step, rollout in zip(steps, rollouts, strict=True):
        assert step.probs_diff_max < tolerance, steps
        assert not long_tail or step.longest > 2 * step.mean_length
        assert rollout.startswith("16 responses")
        live = re.findall(r"tp1dp2 -> tp2dp1 at \S+ s, (\d+) live", rollout)
        assert live
        assert all(1 <= int(number) <= 4 for number in live)


AGENTS = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={EXAMPLE.with_name('calculator.py')}",
    "actor_rollout_ref.rollout.multi_turn.format=random_model",
    "data.max_response_length=256",
    "actor_rollout_ref.rollout.max_model_len=384",
)


def check_drafts(run: GRPO) -> None:
    """Each rollout had drafts, and some were accepted. Training may break the model's phrase."""
    counts = [re.findall(r"(\d+) of (\d+) draft tokens accepted", o) for o in run.rollouts()[:3]]
    accepted = [int(number) for ((number, _),) in counts]
    assert len(accepted) == 3 and any(accepted), counts


def test_three_steps() -> None:
    with grpo(SCHEDULE) as run:
        run.succeed()
        check_steps(run)
        run.leaves_nothing()


def test_agents() -> None:
    """Trajectories of three turns with the example's calculator between, two steps of them."""
    with grpo(SCHEDULE, *AGENTS, "trainer.total_training_steps=2") as run:
        run.succeed()
        steps, rollouts = run.steps(), run.rollouts()
        assert len(steps) == len(rollouts) == 2
        for step, rollout in zip(steps, rollouts, strict=True):
            assert step.probs_diff_max < 1e-5
            assert step.num_turns > 5  # of the 6 that verl counts, with questions and answers
            assert int(rollout.split()[0]) > 2 * 16  # each turn is a response
            assert "tp1dp2 -> tp2dp1" in rollout
        run.leaves_nothing()


def test_a_mixture_of_experts() -> None:
    """Experts whole in replicas, spread in the group. New weights come to both."""
    model = f"actor_rollout_ref.model.path={mixture_chat('olmoe')}"
    with grpo(SCHEDULE, f"{PAT}.experts=ep", *IN_PLACE, model) as run:
        run.succeed()
        check_steps(run, tolerance=1e-4, long_tail=False)
        run.leaves_nothing()


IN_PLACE = (f"{PAT}.weights=inplace",)
KINDS = {
    "gemma3_text": (),
    "gpt_oss": IN_PLACE,
    "qwen3_next": IN_PLACE,
    "nemotron_h": IN_PLACE,
    "deepseek_v3": IN_PLACE,
}
"""Sliding windows, linear and latent attention. Copies of experts cannot be updated on CPU."""


@pytest.mark.parametrize("arch", KINDS)
def test_kinds_of_state(arch: str) -> None:
    model = f"actor_rollout_ref.model.path={small_chat(arch)}"
    with grpo(SCHEDULE, *KINDS[arch], model) as run:
        run.succeed()
        check_steps(run, tolerance=1e-4, long_tail=False)
        run.leaves_nothing()


def test_images(tmp_path: Path) -> None:
    """Each step has the images of the step before. VeRL trains towers, and sends them, too.

    With stock vLLM's rollouts (`rollout.name=vllm rollout.load_format=auto` in place of PAT's
    options) its training sees probabilities of the same tokens that are up to 0.27 off in the
    second step; why is not known. So `tests/verl/test_classes.py` compares numbers.
    """
    data = write_pictured(tmp_path / "train.parquet")
    images = (
        f"actor_rollout_ref.model.path={pictured_chat()}",
        *(f"data.{kind}_files={data}" for kind in ("train", "val")),
        "+actor_rollout_ref.rollout.limit_images=2",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0",
    )
    with grpo(SCHEDULE, *IN_PLACE, *images) as run:
        run.succeed()
        check_steps(run, tolerance=1.0, long_tail=False)
        run.leaves_nothing()


def pictures_of(index: int) -> list[Any]:
    """Images of 6 tokens each, one or two."""
    return data_of([("image", 2 * index + i, 84, 56) for i in range(1 + index % 2)])["image"]


def write_pictured(path: Path) -> Path:
    """As many questions as a step has, with an image or two each."""
    rows = []
    for index in range(4):
        images = []
        for picture in pictures_of(index):
            file = io.BytesIO()
            picture.save(file, "png")
            images.append({"bytes": file.getvalue(), "path": None})
        question = "<image>" * len(images) + f"What is this, {index}?"
        row = {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": question}],
            "images": images,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        rows.append(row)
    pd.DataFrame(rows).to_parquet(path)
    return path


def test_vllm_with_pats_executor_then_a_worker_dies() -> None:
    """The other way to ask for PAT; and what happens when an engine is killed in a rollout.

    The layouts share one copy of the weights, as on GPUs, and the engine speculates.
    """
    inplace = f"{PAT}.weights=inplace"
    model = f"actor_rollout_ref.model.path={repeating_chat('llama')}"
    steps = "trainer.total_training_steps=100"
    with grpo(*VLLM, SCHEDULE, inplace, DRAFTS, model, steps) as run:
        run.wait_for(lambda: "step:3 - " in run.printed_by_workers(), "step 3")
        victim = run.processes("VLLM::Worker")[-1]
        # The next rollout begins, and cannot end before the worker is killed.
        victim.suspend()
        time.sleep(4)
        victim.kill()

        assert run.child.wait() != 0
        # Steps that verify drafts compute other shapes, also of the same tokens. And the model
        # ends its phrases when it likes.
        check_steps(run, tolerance=1e-4, long_tail=False)
        check_drafts(run)
        assert len(run.steps()) == 3
        assert "the PAT engine of rollout replica 0 has died" in run.output
        run.leaves_nothing()
