"""Decode steps and memory of whole engines: each layout beside stock vLLM at its tp.

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
from pat_vllm.cli.doctor_models import self_test_models, shape_of
from pat_vllm.config import PATConfig
from pat_vllm.doctor.child import environment
from pat_vllm.doctor.tasks import prompts
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
    with tempfile.TemporaryDirectory(prefix="pat-vllm-engines-") as folder:
        if known := MODEL_SHAPES.get(shape):
            model, vocab = write_config(Path(folder), shape), known["vocab_size"]
        else:
            models = self_test_models(Path(folder), shape_of(shape), ranks, 0)
            model, vocab = models.first, models.vocab
        engine: dict[str, Any] = {
            "model": str(model),
            "load_format": "dummy" if known else "auto",
            "dtype": "float32" if on_cpu else "bfloat16",
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
        pat |= {"layouts": [layout.tp for layout in layouts], "experts": "both"}
        if on_cpu:
            pat["weights"] = "inplace"
        stock = {}
        texts = prompts(vocab, max(REQUESTS) * ranks)
        for layout in layouts:
            tp = {"tensor_parallel_size": layout.tp}
            stock[layout.tp] = _measured({**engine, **tp}, texts, on_cpu)
        ours = {"tensor_parallel_size": ranks, "distributed_executor_backend": "pat"}
        ours["additional_config"] = {"pat": pat}
        with_pat = _measured({**engine, **ours}, texts, on_cpu)
    return {
        "about": (
            f"Random model {shape}. Milliseconds between two tokens of a request, timed in the "
            "front end: one alone, or several in each replica. Stock vLLM has the layout's tp, and "
            "one replica. Then MiB of the rank with most; memory is that "
            f"{'of a process' if on_cpu else 'in use of a GPU'}, packed weights have no size."
        ),
        "tables": [_beside_stock(with_pat["steps"], stock), _memory(with_pat, stock)],
    }


def _beside_stock(
    steps: Sequence[dict[str, Any]], stock: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    rows = []
    for row in steps:
        of_tp = stock[Layout.parse(row["layout"]).tp]["steps"]
        (other,) = (step for step in of_tp if step["requests"] == row["requests"])
        rows.append({**row, "stock ms": other["ms"], "ratio": row["ms"] / other["ms"]})
    return rows


def _memory(ours: dict[str, Any], stock: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """MiB of the rank that has most."""

    def most(ranks: Sequence[dict[str, Any]], what: str) -> float:
        return max(rank[what] for rank in ranks) / 2**20

    rows = []
    for name in dict.fromkeys(row["layout"] for row in ours["steps"]):
        theirs = stock[Layout.parse(name).tp]["ranks"]
        rows.append(
            {
                "layout": name,
                "weights": max(rank["weights"][name] for rank in ours["ranks"]) / 2**20,
                "stock weights": max(rank["weights"][_STOCK] for rank in theirs) / 2**20,
                "held": most(ours["ranks"], "held"),
                "memory": most(ours["ranks"], "memory"),
                "stock memory": most(theirs, "memory"),
            }
        )
    return rows


def _measured(
    engine: dict[str, Any], texts: Sequence[Sequence[int]], on_cpu: bool
) -> dict[str, Any]:
    variables = {
        **environment(engine["tensor_parallel_size"]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # `_facts` is sent to the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if not on_cpu:
        del variables["TORCHDYNAMO_DISABLE"]
    with EngineProcess(engine, variables) as process:
        process.wait_until_ready()
        measured: dict[str, Any] = process.call(time_steps, texts)
    return measured


def time_steps(llm: Any, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """In the engine's process: milliseconds between two tokens of a request, and `_facts`."""
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
                    from pat_vllm.doctor.engine import switch_to

                    switch_to(llm, layout)
                gaps = _gaps(llm, texts[:total])
            name = _STOCK if layout is None else str(layout)
            steps.append({"layout": name, "requests": requests, **milliseconds(Summary.of(gaps))})
    return {"steps": steps, "ranks": llm.collective_rpc(_facts)}


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


def _facts(worker: Any) -> dict[str, Any]:
    """What a rank holds, in bytes.

    Returns:
        `weights` of each layout by its name, as the layout sees them; less where vLLM has packed
        them for its CPU kernels and freed what they were; `held`, of all layouts' weights
        together; `memory`, of the process on CPU, else of the device in use.
    """
    import psutil
    import torch

    runtimes = getattr(worker, "_runtimes", None)
    runners = {_STOCK: worker.model_runner}
    if runtimes:
        runners = {str(layout): runtime.runner for layout, runtime in runtimes.items()}
    storages: dict[int, int] = {}
    weights = {}
    for name, runner in runners.items():
        parameters = list(runner.get_model().parameters())
        weights[name] = sum(p.numel() * p.element_size() for p in parameters)
        of_model = (parameter.untyped_storage() for parameter in parameters)
        storages |= {storage.data_ptr(): storage.nbytes() for storage in of_model}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = total - free
    else:
        memory = psutil.Process().memory_info().rss
    return {"weights": weights, "held": sum(storages.values()), "memory": memory}
