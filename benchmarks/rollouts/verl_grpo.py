"""VeRL's own GRPO trainer on the policy and its problems, with PAT's engine, side by side.

    .venv-verl/bin/python -m benchmarks.rollouts.verl_grpo --epochs 6

The policy is trained on worked solutions first, once (`.models/rollouts/policy`). Each side is a
training of its own, from the same policy and with the same problems, one after the other: what they
learn differs from the first rollout on, since sampling does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paired import paired_ratio
from benchmarks.record import ROOT, machine, table, write_results
from benchmarks.rollouts.arithmetic import problem
from benchmarks.rollouts.model import pretrain
from pat_vllm.predictor.draft_schedule import ngram_config
from tests.support import patient_ray

POLICY = ROOT / ".models" / "rollouts" / "policy"
EXAMPLE = ROOT / "integrations" / "verl" / "examples" / "grpo.sh"
ENGINE = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
MOST_PROMPT_TOKENS = 256
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
)
"""As the policy saw questions when it was trained."""
SIDES: dict[str, tuple[dict[str, Any], int]] = {
    "PAT": ({}, 8),
    "PAT, n-gram": ({"draft_history_bytes": 0}, 8),
    **{
        f"tp={tp}, n-gram of 4": (
            {"draft_history_bytes": 0, "policy": {"kind": "static", "tp": tp}},
            4,
        )
        for tp in (1, 2)
    },
}
"""PAT's options, and the most draft tokens of a step; in a static layout it has as many always."""


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        rollout: seconds of the rollout, as VeRL times it.
        lengths: tokens of each response.
        accepted: draft tokens.
    """

    reward: float
    rollout: float
    lengths: tuple[int, ...]
    accepted: int

    @property
    def tokens_per_step(self) -> float:
        """Of a response."""
        tokens = sum(self.lengths)
        return tokens / (tokens - self.accepted)

    @property
    def microseconds(self) -> float:
        """Of the rollout, for each token."""
        return 1e6 * self.rollout / sum(self.lengths)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=768, help="of a response, at most")
    parser.add_argument("--sides", nargs="+", default=list(SIDES)[:3], choices=list(SIDES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    facts = machine()
    if not POLICY.exists():
        pretrain(POLICY)
    # Ray's sockets lie in it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="pat-", dir="/tmp", ignore_cleanup_errors=True) as work:
        data = write_data(Path(work), args.prompts, args.seed)
        sides: dict[str, list[Step]] = {}
        for side in args.sides:
            sides[side] = train(Path(work), data, side, args)
            print(side, sides[side], flush=True)
    body = {"arguments": vars(args), "steps": sides}
    write_results("rollouts-verl", facts, body, shown(sides, args))


def write_data(work: Path, prompts: int, seed: int) -> Path:
    """Write the problems as VeRL reads them, and the policy with its questions' form."""
    import pandas as pd
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    rng = random.Random(f"verl/{seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < prompts:
        task = problem(rng)
        if len(tokenizer.encode(task.text)) < MOST_PROMPT_TOKENS - 2:
            rows.append(
                {
                    "data_source": "arithmetic",
                    "prompt": [{"role": "user", "content": task.text}],
                    "reward_model": {"style": "rule", "ground_truth": str(task.answer)},
                    "extra_info": {"index": len(rows)},
                }
            )
    model = work / "policy"
    shutil.copytree(POLICY, model)
    tokenizer.chat_template = TEMPLATE
    # VeRL asks for it of every Qwen3; neither it nor the policy uses it here.
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.save_pretrained(model)
    pd.DataFrame(rows).to_parquet(work / "train.parquet")
    return work / "train.parquet"


def train(work: Path, data: Path, side: str, args: argparse.Namespace) -> list[Step]:
    """A training with one side's engine, to its end.

    Raises:
        RuntimeError: the trainer failed.
    """
    dump = work / re.sub(r"\W+", "-", side)
    pat, drafts = SIDES[side]
    options = {
        f"{ENGINE}.additional_config.pat": pat,
        f"{ENGINE}.speculative_config": ngram_config(drafts),
    }
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    settings = {
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": MOST_PROMPT_TOKENS,
        "data.max_response_length": args.tokens,
        "actor_rollout_ref.model.path": work / "policy",
        f"{actor}.optim.lr": 2e-4,
        f"{actor}.ppo_mini_batch_size": max(1, args.prompts // 4),
        f"{rollout}.n": args.samples,
        f"{rollout}.max_model_len": MOST_PROMPT_TOKENS + args.tokens,
        f"{rollout}.max_num_seqs": args.prompts * args.samples,
        f"{rollout}.max_num_batched_tokens": 4096,
        "reward.custom_reward_function.path": ROOT / "benchmarks" / "rollouts" / "reward.py",
        "trainer.total_epochs": args.epochs,
        "trainer.total_training_steps": args.epochs,
        "trainer.rollout_data_dir": dump,
        f"+{ENGINE}.kv_cache_memory_bytes": 768 << 20,
        "+ray_kwargs.ray_init.address": "local",
    }
    command = [str(EXAMPLE), *(f"{name}={value}" for name, value in settings.items())]
    command += [f"{name}={_hydra(value)}" for name, value in options.items()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "WORK": str(work), "RAY_TMPDIR": str(work), "BIND": "0|1"}
    environment = {**os.environ, **patient_ray.ENVIRONMENT, **own}
    output = work / f"{dump.name}.log"
    with open(output, "w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    text = output.read_text(errors="replace")
    if done.returncode:
        errors = [line for line in text.splitlines() if re.search(r"Error(?!\(.No module)", line)]
        said = "\n".join([*errors[:20], text[-3000:]])
        raise RuntimeError(f"VeRL ended with {done.returncode}:\n{said}")
    return _steps(text, dump, work / "policy")


def _hydra(value: object) -> str:
    """As its overrides are written."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_hydra(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return str(value)


def _steps(text: str, dump: Path, model: Path) -> list[Step]:
    """What VeRL logged and dumped, and what PAT said of each rollout."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = re.findall(r"\bstep:\d+ - .*", text)
    rollouts = re.findall(r"PAT rollout .*", text)
    steps = []
    for number, (line, rollout) in enumerate(zip(lines, rollouts, strict=True), 1):
        drafts = re.search(r"(\d+) of \d+ draft tokens accepted", rollout)
        seconds = re.search(r"timing_s/gen:([0-9.e+-]+)", line)
        assert seconds, "VeRL did not log how long the rollout took"
        samples = [json.loads(row) for row in (dump / f"{number}.jsonl").read_text().splitlines()]
        texts = [sample["output"] for sample in samples]
        steps.append(
            Step(
                reward=float(np.mean([sample["score"] for sample in samples])),
                rollout=float(seconds[1]),
                lengths=tuple(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"])),
                accepted=int(drafts[1]) if drafts else 0,
            )
        )
    return steps


def shown(sides: Mapping[str, Sequence[Step]], args: argparse.Namespace) -> str:
    """Markdown."""
    rows = [
        [
            number,
            side,
            f"{step.reward:.3f}",
            *(f"{np.percentile(step.lengths, q):.0f}" for q in (50, 100)),
            f"{step.tokens_per_step:.2f}",
            f"{step.rollout:.1f}",
            f"{step.microseconds:.0f}",
        ]
        for side, steps in sides.items()
        for number, step in enumerate(steps)
    ]
    heads = ["epoch", "side", "reward", "median", "longest", "tokens a step", "rollout, s"]
    first, *others = sides
    ratios = []
    for other in others:
        ours, theirs = ([step.microseconds for step in sides[side]] for side in (first, other))
        ratio = paired_ratio(ours, theirs).show()
        ratios.append([f"{first} / {other}", ratio, f"{ours[0] / theirs[0]:.2f}"])
    return "\n".join(
        [
            f"VeRL's GRPO, {args.prompts} problems, {args.samples} samples of each, responses of "
            f"up to {args.tokens} tokens, temperature 1; each side is a training of its own.\n",
            table([*heads, "us a token"], rows),
            "Time of a token, epoch by epoch (geometric mean, 95% interval), and in the first:\n",
            table(["", "ratio", "epoch 0"], ratios),
        ]
    )


if __name__ == "__main__":
    main()
