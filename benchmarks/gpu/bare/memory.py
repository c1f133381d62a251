"""What an engine takes of the GPU: `python -m benchmarks.gpu.bare.memory MODEL [--ranks N]`.

PAT with CUDA graphs and random weights: what is in use after each phase of the start, which
`one_gpu` has workers print, then after switches with a full batch, and what each switch took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import cycle

from benchmarks.gpu.bare.one_gpu import tell_memory
from pat_vllm.doctor.request import prompts
from pat_vllm.doctor.serving import MAX_TOKENS, generate, switch_to

SWITCHES = 20
REQUESTS, TOKENS = 64, 560
"""At least, of each prompt; 5 GiB of Qwen3-8B's KV."""


def main(arguments: Sequence[str]) -> None:
    """Start the engine, switch, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with a config")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engine", type=json.loads, default={}, help="further options of vLLM's")
    given = parser.parse_args(arguments)
    # Functions are sent to the workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    from pat_vllm.api import report

    engine = {
        "load_format": "dummy",
        "max_model_len": 16384,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.88 / given.ranks,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "pat",
        "additional_config": {"pat": {"base_tp": 1, "policy": {"kind": "static"}}},
    }
    llm = LLM(given.model, tensor_parallel_size=given.ranks, **{**engine, **given.engine})
    vocab = llm.llm_engine.model_config.get_vocab_size()
    texts = tuple(text * (TOKENS // len(text) + 1) for text in prompts(vocab, REQUESTS))
    every = MAX_TOKENS // (SWITCHES + 1)
    turns = zip(range(1, SWITCHES + 1), cycle(reversed(report(llm).layouts)), strict=False)
    generate(llm, texts, {every * n: partial(switch_to, llm, layout) for n, layout in turns})
    for switch in report(llm).switches:
        moved = f"{switch.num_seqs} in flight, {switch.migrated} migrated"
        print(f"{switch.source} -> {switch.target}: {moved}, {1e3 * switch.seconds:.1f} ms")
    llm.collective_rpc(tell_memory, args=("switches",))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
