"""Decode steps of whole engines: each layout beside stock vLLM at its tp.

Needs vLLM. Both are asked the same, in the same way: tokens are timed as they come to the front
end. On GPUs engines compile and capture as vLLM does by default, on CPU they are eager.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess
from benchmarks.gpu.known import write_config
from benchmarks.gpu.timing import milliseconds
from benchmarks.record import Summary
from pat_vllm.config import PATConfig
from pat_vllm.doctor.child import environment
from pat_vllm.doctor.models import Weights, shape_named, write_checkpoint
from pat_vllm.doctor.request import prompts
from pat_vllm.layout import Layout
from pat_vllm.models.known_models import MODEL_SHAPES

REQUESTS = (1, 8)
"""Of a replica: one alone in the engine, or several in each."""
_STOCK = "stock"
"""In place of a layout's name."""
_TOKENS = 64
_UNSETTLED = 8
"""Tokens of a request that do not count: others may still be admitted."""


def measure(ranks: int, shape: str, on_cpu: bool) -> dict[str, Any]:
    """Start an engine of stock vLLM for each layout's tp and one with PAT, and time them.

    Args:
        shape: of the random model, as in `pat-vllm doctor --shape`; or the name of a known model,
            whose weights are vLLM's dummies.
    """
    layouts = PATConfig(base_tp=1).resolve_layouts(ranks)
    dtype = "float32" if on_cpu else "bfloat16"
    with tempfile.TemporaryDirectory(prefix="pat-vllm-engines-") as folder:
        if known := MODEL_SHAPES.get(shape):
            model, vocab = write_config(Path(folder), shape), known["vocab_size"]
        else:
            config = shape_named(shape).config_for(ranks) | {"dtype": dtype}
            model, vocab = Path(folder) / "model", config["vocab_size"]
            write_checkpoint(model, config, Weights(shape_named(shape).gain))
        engine: dict[str, Any] = {
            "model": str(model),
            "load_format": "dummy" if known else "auto",
            "dtype": dtype,
            "enforce_eager": on_cpu,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 256 << 20,
            "skip_tokenizer_init": True,
            "seed": 0,
            # A process for each rank, also where there is one rank.
            "distributed_executor_backend": "mp",
        }
        pat = {"base_tp": 1, "policy": {"kind": "static"}, "kv_transfer": "migrate"}
        pat |= {"layouts": [layout.tp for layout in layouts]}
        if on_cpu:
            pat["weights"] = "inplace"
        texts = prompts(vocab, max(REQUESTS) * ranks)
        stock = {
            (layout.tp, row["requests"]): row["ms"]
            for layout in layouts
            for row in _measured({**engine, "tensor_parallel_size": layout.tp}, texts, on_cpu)
        }
        ours = {"tensor_parallel_size": ranks, "distributed_executor_backend": "pat"}
        ours["additional_config"] = {"pat": pat}
        rows = _measured({**engine, **ours}, texts, on_cpu)
    for row in rows:
        row["stock ms"] = stock[Layout.parse(row["layout"]).tp, row["requests"]]
        row["ratio"] = row["ms"] / row["stock ms"]
    return {
        "about": (
            f"Random model {shape}. Milliseconds between two tokens of a request, timed in the "
            "front end: one alone, or several in each replica. Stock vLLM has the layout's tp, and "
            "one replica."
        ),
        "tables": [rows],
    }


def _measured(
    engine: dict[str, Any], texts: Sequence[Sequence[int]], on_cpu: bool
) -> list[dict[str, Any]]:
    variables = {
        **environment(engine["tensor_parallel_size"]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    if not on_cpu:
        del variables["TORCHDYNAMO_DISABLE"]
    with EngineProcess(engine, variables) as process:
        process.wait_until_ready()
        measured: list[dict[str, Any]] = process.call(time_steps, texts)
    return measured


def time_steps(llm: Any, texts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """In the engine's process: milliseconds between two tokens of a request."""
    layouts: tuple[Layout | None, ...] = (None,)
    if "pat" in llm.llm_engine.vllm_config.additional_config:
        from pat_vllm.api import report

        layouts = report(llm).layouts
    steps = []
    for layout in layouts:
        for requests in REQUESTS:
            total = requests if layout is None or requests == 1 else requests * layout.replicas
            for _ in range(2):  # the first one warms up
                if layout is not None:
                    from pat_vllm.doctor.serving import switch_to

                    switch_to(llm, layout)
                gaps = _gaps(llm, texts[:total])
            name = _STOCK if layout is None else str(layout)
            steps.append({"layout": name, "requests": requests, **milliseconds(Summary.of(gaps))})
    return steps


def _gaps(llm: Any, texts: Sequence[Sequence[int]]) -> list[float]:
    """Seconds between the tokens of each request, all requests together."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(texts):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
    came: dict[str, list[float]] = defaultdict(list)
    while engine.has_unfinished_requests():
        answered = engine.step()
        now = time.perf_counter()
        for output in answered:
            came[output.request_id].append(now)
    return [b - a for times in came.values() for a, b in pairwise(times[_UNSETTLED:])]
