"""What the benchmarks share: models, prompts, and engines in child processes.

Nothing here imports vLLM or torch at module level: the environment that binds an engine to cores
has to be set before.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess
from benchmarks.record import ROOT

PLAIN_WEIGHTS = ROOT / "tests" / "support" / "plain_weights"

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Or vLLM's n-gram drafter changes how many threads OpenMP has, also for steps without drafts.
    "NUMBA_NUM_THREADS": "1",
}
"""What every engine gets, whichever side it is on."""

_LAYERS: dict[str, Any] = dict(layers=12, vocab=32_000, dtype="bfloat16")
_WIDE = {**_LAYERS, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate": 2048}
_DEMO: dict[str, Any] = dict(
    arch="qwen3",
    hidden=512,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1536,
    vocab=151_936,
    dtype="float32",
)

MODELS: dict[str, dict[str, Any]] = {
    # The demo's shape: 169M parameters. Its large vocabulary has many requests go faster in
    # replicas and few in one group, also where all ranks share the memory.
    "qwen3-170m": _DEMO,
    "moe": {
        **_DEMO,
        "arch": "qwen3_moe",
        "experts": 16,
        "experts_per_token": 4,
        "expert_intermediate": 256,
        "max_position_embeddings": 4096,
    },
    # Qwen3-0.6B's shape.
    "qwen3-0.6b": dict(
        arch="qwen3",
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab=151_936,
        tie=True,
        dtype="bfloat16",
        max_position_embeddings=4096,
    ),
    # A step of tens of milliseconds on one core, so that overheads show as on a fast device.
    "qwen3-100m": {**_WIDE, "arch": "qwen3", "max_position_embeddings": 4096},
    # With an MTP module, of whose drafts some are accepted.
    "mimo-100m": {**_WIDE, "arch": "qwen2", "repeat": 1.2, "max_position_embeddings": 4096},
    # Small enough for eight ranks on two cores.
    "qwen3-tiny": dict(arch="qwen3", heads=8, kv_heads=8, vocab=4096, max_position_embeddings=4096),
    # Other kinds of state: windows in two layers of three, ...
    "gemma3": {**_WIDE, "arch": "gemma3_text", "tie": True, "window": 256},
    # ... linear attention in two layers of three, ...
    "qwen3-next": dict(**_LAYERS, arch="qwen3_next", hidden=512, heads=8, kv_heads=4, head_dim=128),
    # ... and latent attention.
    "deepseek-v3": dict(**_LAYERS, arch="deepseek_v3", hidden=512, heads=8, kv_heads=8),
}


def checkpoint(name: str) -> Path:
    """A random checkpoint from `MODELS`, built on first use under `.models/`; else the folder of
    this name."""
    from tests.support.drafters import mimo
    from tests.support.random_models import kept_model

    if name in MODELS:
        finish = {"finish": mimo} if name.startswith("mimo") else {}
        return kept_model(ROOT / ".models", name, MODELS[name], **finish)
    return Path(name).resolve()


def config_of(model: Path) -> dict[str, Any]:
    """A checkpoint's config.json."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def random_prompts(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens, so that no two share a prefix."""
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(300, 4000) for _ in range(length)]}
        for _ in range(count)
    ]


class Engine(EngineProcess):
    """An `LLM` in a process of its own, with the environment that every side gets."""

    def __init__(
        self,
        options: Mapping[str, Any],
        bind: str,
        plain: bool = False,
        core_inside: bool = False,
        code: Path | None = None,
    ) -> None:
        """Begin to start it.

        Args:
            options: of `LLM`.
            bind: `VLLM_CPU_OMP_THREADS_BIND`.
            plain: have vLLM keep plain weights, as on GPUs.
            core_inside: have its engine core in the same process.
            code: as of `EngineProcess`.
        """
        environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": bind}
        if core_inside:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if plain:
            path = [str(PLAIN_WEIGHTS), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        super().__init__(options, environment, code=code)


@contextmanager
def awake(engines: Sequence[EngineProcess]) -> Iterator[None]:
    """Have paused engines go on inside; one that waits for its turn takes no core."""
    for engine in engines:
        engine.resume()
    try:
        yield
    finally:
        # After a batch, an engine learns in a step of its own that nothing is left to do.
        time.sleep(_SETTLE_SECONDS)
        for engine in engines:
            engine.pause()


_SETTLE_SECONDS = 0.1
