"""Whether vLLM's build runs here, and PAT on one rank: `python -m benchmarks.gpu.bare.smoke`.

Stock vLLM first, without its compiler and graphs, then with them, then PAT both ways. All are asked
the same, and have to say what the first one says.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

from pat_vllm.doctor.compare import Reference, compare_outputs
from pat_vllm.doctor.plan import prompts
from pat_vllm.doctor.session import Session, generate, score

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

    from pat_vllm.cli.random_model import make_model

    reference = None
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, dtype="bfloat16", hidden=512, head_dim=128)
        for name, options in ENGINES.items():
            begun = time.perf_counter()
            llm = LLM(
                folder,
                max_model_len=512,
                max_num_seqs=16,
                kv_cache_memory_bytes=256 << 20,
                skip_tokenizer_init=True,
                seed=0,
                **options,
            )
            started = time.perf_counter() - begun
            session = Session({}, "", prompts(512), 48)
            outputs = generate(llm, session, lambda: None, likeliest=0 if reference else 5)
            if reference is None:
                reference = Reference(outputs, score(llm, session.prompts, outputs))
            llm.llm_engine.engine_core.shutdown()
            agreement = compare_outputs(reference.outputs, outputs, reference.tolerance)
            problem = reference.problem or agreement.problem
            print(f"{name}: started in {started:.1f} s; {problem or agreement}", flush=True)
            if problem:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
