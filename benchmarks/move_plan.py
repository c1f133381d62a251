"""How long a start takes to plan the moves of weights between all layouts, without a device.

    python -m benchmarks.move_plan
    python -m benchmarks.move_plan --plain

One rank's models of Qwen3-8B's shape are made for each layout, with weights in fp8 by blocks, or in
16 bits. They lie in one storage, whose values nobody writes or reads. Bar: 1 s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import Summary, machine, table, write_results

SHAPE = "qwen3-8b"
LAYOUTS = (1, 2, 4, 8)
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="weights in 16 bits")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        seconds = [_plan(Path(folder), arguments.plain) for _ in range(arguments.repeats)]
    name = "16 bits" if arguments.plain else "fp8, blocks of 128"
    text = f"Plans of all moves, {SHAPE}'s shape, tp {LAYOUTS} of 8 ranks, by rank 0.\n\n"
    text += table(["weights", "seconds"], [[name, Summary.of(seconds).show(digits=2)]])
    file = f"move-plan-{'plain' if arguments.plain else 'fp8'}"
    write_results(file, facts, {"seconds": seconds}, text)


def _plan(folder: Path, plain: bool) -> float:
    import torch
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from pat_vllm.layout import Layout
    from pat_vllm.models.known_models import MODEL_SHAPES
    from pat_vllm.weights.inplace import InPlaceShards
    from tests.support import fp8_on_cpu
    from tests.vllm.weights.test_weights import build, in_place, vllm_config_for

    shape: dict[str, Any] = {**MODEL_SHAPES[SHAPE]}
    if not plain:
        shape["quantization_config"] = BLOCKS
    (folder / "config.json").write_text(json.dumps(shape))
    layouts = [Layout.of(tp, 8) for tp in LAYOUTS]
    strategy = InPlaceShards(layouts, rank=0)
    with fp8_on_cpu.applied():
        config = vllm_config_for(folder, tp=1, dtype="bfloat16", skip_tokenizer_init=True)
        for layout in layouts:
            place = layout.place_of(0, "tp")
            if layout is layouts[0]:
                model = build(config, place)
                strategy.capture(model)
            else:
                with strategy.building():
                    model = build(config, place)
                strategy.fill(model)
            with in_place(place, config.parallel_config):
                process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        begun = time.perf_counter()
        strategy.release()
        return time.perf_counter() - begun


if __name__ == "__main__":
    main()
