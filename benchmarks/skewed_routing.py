"""Measured: steps with cut and with spread experts, by how evenly the router spreads tokens.

    python -m benchmarks.skewed_routing

A random mixture's router spreads tokens evenly, which flatters spread experts: a step waits for the
rank whose experts have most tokens. Others here are the same but for their routers: row e is
multiplied by (e + 1) ** -skew, so that popular experts come first. Of spread experts they lie on
the first rank: no placement is worse. `pat-vllm profile` measures all, with weights in place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import ENVIRONMENT, MODELS, machine, table, write_results
from pat_vllm.profiling.profile import Profile, StepSample

RANKS = 2
SKEWS = (0.0, 0.5, 1.0)
MODEL: Mapping[str, Any] = {**MODELS["moe"], "vocab": 4096}
"""The demo's mixture. With fewer tokens to choose from, experts take more of a step."""
_TOKENS = 4096
"""That are routed to count what each expert gets."""

KINDS = ("cut", "spread", "spread / cut")
"""Columns of a mixture in the table."""


def skew_routers(source: Path, target: Path, skew: float) -> None:
    """Copy a checkpoint; in every router of the copy multiply row e by (e + 1) ** -skew."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(".mlp.gate.weight"):
            rows = torch.arange(1, len(weight) + 1, dtype=weight.dtype)
            weights[name] = weight * rows[:, None] ** -skew
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def shares(path: Path, ranks: int = RANKS) -> list[float]:
    """The share of each rank, where experts are spread, in what random tokens are routed to.

    Returns:
        Of `ranks` numbers whose sum is 1; over all layers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    config = model.config
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, config.vocab_size, (_TOKENS // 64, 64), generator=generator)
    with torch.no_grad():
        logits = model(prompts, output_router_logits=True).router_logits
    chosen = torch.cat([layer.topk(config.num_experts_per_tok).indices for layer in logits])
    counts = torch.bincount(chosen.flatten(), minlength=config.num_experts).view(ranks, -1).sum(1)
    return [float(share) for share in counts / counts.sum()]


def profiled(path: Path, output: Path) -> Profile:
    """What `pat-vllm profile` says of a mixture with both kinds of layout."""
    options = {
        "--tensor-parallel-size": str(RANKS),
        "--dtype": "float32",
        "--max-model-len": "384",
        "--max-num-seqs": "96",
        "--kv-cache-memory-bytes": str(400_000_000),
        "--pat": json.dumps({"weights": "inplace"}),
        "--output": str(output),
    }
    command = [sys.executable, "-P", "-c", "from pat_vllm.cli import app; app()"]
    command += ["profile", str(path)]
    command += ["--enforce-eager", *(word for option in options.items() for word in option)]
    binding = "|".join(map(str, range(RANKS)))
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": binding}
    subprocess.run(command, env=environment, check=True)
    return Profile.load(output)


def decode_times(profile: Profile) -> dict[str, dict[int, float]]:
    """Seconds of a step of one group of all ranks, by layout and requests; shortest contexts."""
    steps: dict[str, dict[int, StepSample]] = {}
    for step in profile.steps:
        if step.layout.tp == RANKS and step.batch and not step.prefill:
            of_layout = steps.setdefault(str(step.layout), {})
            best = of_layout.get(step.batch)
            if best is None or step.context < best.context:
                of_layout[step.batch] = step
    return {
        name: {batch: step.seconds for batch, step in of_layout.items()}
        for name, of_layout in steps.items()
    }


def rows(times: Iterable[dict[str, dict[int, float]]]) -> list[list[str]]:
    """Cells: requests; of each mixture ms with cut experts, with spread ones, and their ratio."""
    cut, spread = f"tp{RANKS}dp1", f"tp{RANKS}dp1ep"
    mixtures = list(times)
    common = set.intersection(*(set(one[name]) for one in mixtures for name in (cut, spread)))
    return [
        [
            str(batch),
            *(
                cell
                for one in mixtures
                for cell in (
                    f"{1e3 * one[cut][batch]:.1f}",
                    f"{1e3 * one[spread][batch]:.1f}",
                    f"{one[spread][batch] / one[cut][batch]:.2f}",
                )
            ),
        ]
        for batch in sorted(common)
    ]


def main() -> None:
    """Make the mixtures, profile them, and write what their steps take."""
    from pat_vllm.cli.random_model import make_model

    shares_of, times_of = {}, {}
    with tempfile.TemporaryDirectory(prefix="pat-vllm-routing-") as scratch:
        made = Path(scratch) / "made"
        make_model(made, **MODEL)
        for skew in SKEWS:
            path = Path(scratch) / f"{skew}"
            skew_routers(made, path, skew)
            shares_of[f"{skew:g}"] = shares(path)
            times_of[f"{skew:g}"] = decode_times(profiled(path, path.with_name(f"{skew}.json")))
    heads = [f"{max(one):.0%}: {kind}" for one in shares_of.values() for kind in KINDS]
    text = (
        "Milliseconds of a decode step of one group of 2 ranks, experts in torch on CPU. Per cent: "
        f"share of the busiest rank, of spread experts, in the routing of {_TOKENS:,} random "
        f"tokens, by skews of {', '.join(shares_of)}.\n\n"
        f"{table(['requests', *heads], rows(times_of.values()))}\n"
    )
    write_results("skewed-routing", machine(), {"shares": shares_of, "times": times_of}, text)


if __name__ == "__main__":
    main()
