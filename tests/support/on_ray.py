"""What runs in Ray's own workers. To import this is quick: each task's worker does, and most tasks
need neither vLLM nor torch."""

from __future__ import annotations

import os
from typing import Any

import pat_vllm
from tests.support.engines import engine


def where(worker: Any = None) -> tuple[str, list[str], float]:
    """Runs in a worker: its node, its GPUs, and how many that are."""
    import ray

    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids()["GPU"]
    return context.get_node_id(), gpus, context.get_assigned_resources()["GPU"]


def process_id(worker: Any = None) -> int:
    """Runs in a worker."""
    return os.getpid()


class Host:
    """An actor with an engine of its own, as trainers have them."""

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)

    def start(self, ranks: int, pat: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Start an engine; returns its processes, where its workers are and what they hold."""
        self._engine = engine("qwen3", ranks, pat, in_process=False, from_server=False, **options)
        self._llm = self._engine.__enter__()
        return {
            "pid": os.getpid(),
            "core": self._llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid,
            "ranks": self._llm.collective_rpc(process_id),
            "workers": self._llm.collective_rpc(where),
        }

    def generate(self, lengths: list[int], first: int = 0) -> list[list[int]]:
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": [5, 6, 7 + first + i]} for i in range(len(lengths))],
            [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in lengths],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def report(self) -> Any:
        return pat_vllm.report(self._llm)

    def stop(self) -> None:
        self._engine.__exit__(None, None, None)
