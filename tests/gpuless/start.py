"""Starts of engines with users' defaults on imitated GPUs. A program; see `programs.py`.

Models have their real shapes and one layer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from pat_vllm.models.known_models import MODEL_SHAPES
from tests.gpuless.meta_device import note_python_operators
from tests.gpuless.programs import answer, in_child

GPUS = 8
MEMORY = 80 << 30
_QWEN3 = {
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
_DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _DENSE
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "Qwen3-32B": _DENSE
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
    "Qwen3-30B-A3B": {
        **MODEL_SHAPES["qwen3-30b-a3b"],
        "architectures": ["Qwen3MoeForCausalLM"],
    },
}


def main(out: str, *cases: str) -> None:
    """Start the engine of each case, a platform and a model with a colon between."""
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # which other programs set
    # Functions that modules compile when they are imported.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    note_python_operators()
    import pat_vllm.worker.gpu_worker  # noqa: F401  # once for all

    for case in cases:
        in_child(case, partial(_start_and_answer, out, case))


def _start_and_answer(out: str, case: str) -> None:
    from tests.gpuless.platforms import become

    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp()
    platform, model = case.split(":")
    try:
        become(platform, GPUS)
        outcome = _start(model)
    except Exception:
        outcome = {"failed": traceback.format_exc()}
    answer(out, case, outcome)


def _start(model: str) -> dict[str, Any]:
    from tests.gpuless import meta_gpu

    config = engine_config(model)
    with meta_gpu.imitated_gpus(MEMORY, GPUS) as memory:
        worker, kv_cache_config = meta_gpu.start(config)
        return {
            "layouts": list(map(str, worker._runtimes)),
            "runner": "v2" if config.use_v2_model_runner else "v1",
            "graphs": str(config.compilation_config.cudagraph_mode),
            "in_place": worker._weights.strategy == "inplace",
            "used": memory.used,
            "blocks": kv_cache_config.num_blocks,
            "launched": dict(meta_gpu.launched),
        }


def engine_config(model: str, **options: Any) -> Any:
    """Of an engine with a user's defaults."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as directory:
        described = MODELS[model] | _QWEN3
        (Path(directory) / "config.json").write_text(json.dumps(described))
        defaults = {
            "model": directory,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "tensor_parallel_size": GPUS,
            "distributed_executor_backend": "pat",
        }
        return EngineArgs(**(defaults | options)).create_engine_config()


if __name__ == "__main__":
    main(*sys.argv[1:])
