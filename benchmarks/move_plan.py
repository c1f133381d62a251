"""How long an engine plans its moves of rows at start: of one rank, layouts 1, 2, 4 and 8.

    python -m benchmarks.move_plan --model qwen3-8b --quantization fp8_blocks

Weights are allocated and never written, so that a model of 8 billion parameters fits anywhere.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from pat_vllm.layout import Layout
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.weights.inplace import InPlaceShards
from tests.support import fp8_on_cpu
from tests.vllm.weights.test_weights import build, vllm_config_for

LAYOUTS = [Layout.of(tp, 8) for tp in (1, 2, 4, 8)]
QUANTIZED: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8_blocks": {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    },
}


def seconds(path: Path, rank: int) -> float:
    """Plan the moves between every two layouts."""
    config = vllm_config_for(path, tp=1, dtype="bfloat16", skip_tokenizer_init=True)
    strategy = InPlaceShards(LAYOUTS, rank, "tp")
    models: list[nn.Module] = []
    for layout in LAYOUTS:
        place = layout.place_of(rank, "tp")
        if not models:
            models.append(build(config, place))
            strategy.capture(models[0])
        else:
            with strategy.building():
                models.append(build(config, place))
            strategy.fill(models[-1])
    began = time.perf_counter()
    strategy.release()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODEL_SHAPES, default="qwen3-8b")
    parser.add_argument("--quantization", choices=QUANTIZED, default="fp8_blocks")
    options = parser.parse_args()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        **MODEL_SHAPES[options.model],
        **QUANTIZED[options.quantization],
    }
    with TemporaryDirectory() as folder, fp8_on_cpu.applied():
        (Path(folder) / "config.json").write_text(json.dumps(config))
        took = seconds(Path(folder), rank=3)
    pairs = len([*permutations(LAYOUTS, 2)])
    print(f"{options.model}, {options.quantization}: {pairs} moves planned in {took:.2f} s")


if __name__ == "__main__":
    main()
