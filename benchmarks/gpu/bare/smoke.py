"""Whether vLLM's build runs here, and PAT on one rank: `python -m benchmarks.gpu.bare.smoke`.

Stock vLLM first, without its compiler and graphs, then with them, then PAT both ways, which has to
say what stock vLLM says.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pat_vllm.doctor.compare import Differs, Reference
from pat_vllm.doctor.models import SHAPES, Weights, write_checkpoint
from pat_vllm.doctor.request import prompts
from pat_vllm.doctor.serving import generate, score

PAT = {
    "distributed_executor_backend": "pat",
    "additional_config": {"pat": {"policy": {"kind": "static", "tp": 1}}},
}
ENGINES: dict[str, dict[str, Any]] = {
    "stock vLLM, eager": {"enforce_eager": True},
    "stock vLLM, compiled": {},
    "PAT, eager": {"enforce_eager": True, **PAT},
    "PAT, compiled": PAT,
}


def main() -> int:
    """The exit status."""
    from vllm import LLM

    texts = prompts(512)
    references: list[Reference] = []
    with tempfile.TemporaryDirectory() as folder:
        wide = {"hidden_size": 512, "head_dim": 128, "dtype": "bfloat16"}
        write_checkpoint(Path(folder), SHAPES["dense"].config_for(1) | wide, Weights())
        for number, (name, options) in enumerate(ENGINES.items()):
            begun = time.perf_counter()
            llm = LLM(
                folder,
                max_model_len=512,
                max_num_seqs=16,
                gpu_memory_utilization=0.2,
                kv_cache_memory_bytes=256 << 20,
                skip_tokenizer_init=True,
                seed=0,
                **options,
            )
            started = time.perf_counter() - begun
            outputs = generate(llm, texts, likeliest=5)
            if number < 2:
                # Compiled code rounds to 16 bits in other places than eager code.
                rounding = [
                    reference.apart(score(llm, texts, reference.outputs))
                    for reference in references
                ]
                references.append(Reference(outputs, score(llm, texts, outputs), *rounding))
            llm.llm_engine.engine_core.shutdown()
            expected = references[number // 3]
            tolerance = references[-1].tolerance if number == 1 else expected.tolerance
            try:
                references[-1].check()
                comparison = str(expected.compare_outputs(outputs, tolerance))
            except Differs as error:
                print(f"{name}: {error}", flush=True)
                return 1
            print(f"{name}: started in {started:.1f} s; {comparison}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
