"""What a run of the doctor's looks at, and the engines that it starts for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.doctor.compare import Reference
from pat_vllm.doctor.in_workers import EXTENSION
from pat_vllm.doctor.session import Session
from pat_vllm.gpus import Device
from pat_vllm.layout import Layout


@dataclass(frozen=True)
class Models:
    """Two random models of one shape, for the self-test: folders, and the size of their vocabulary.

    Attributes:
        first, other: checkpoints.
        vocab: ids of prompts are below it.
        draft_lengths: to go through, where the engine is to speculate.
    """

    first: Path
    other: Path
    vocab: int
    draft_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What to look at.

    Attributes:
        ranks: of the engine.
        pat: options of PAT's, of a user's engine.
        engine: further options of vLLM's.
        model: folder of a user's model, or None.
        gpu: to compute memory for; None: those that are found.
        machine: whether the machine at hand is to be tested, or only `gpu` to be computed for.
        dtype: of the self-test; None: float32 on CPU, else bfloat16.
        all: whether to test compiled engines, too.
        figures: whether to measure.
        environment: of the processes, by the number of their engine's ranks, and whether vLLM may
            compile in it.
    """

    ranks: int
    pat: dict[str, Any]
    engine: dict[str, Any]
    model: Path | None
    gpu: Device | None
    machine: bool
    dtype: str | None
    all: bool
    figures: bool
    environment: Callable[[int, bool], Mapping[str, str]]
    prompts: tuple[tuple[int, ...], ...] = field(default=())
    max_tokens: int = 48

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of the engine, the base layout first."""
        return PATConfig.parse(self.pat).resolve_layouts(self.ranks)


def prompts(vocab: int, count: int = 6) -> tuple[tuple[int, ...], ...]:
    """Of the self-test's requests: 10 to 40 tokens."""
    import random

    rng = random.Random(0)
    return tuple(
        tuple(rng.randrange(3, vocab) for _ in range(rng.randint(10, 40))) for _ in range(count)
    )


def self_test_engine(models: Models, plan: Plan, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for stock vLLM, which everything is compared with."""
    engine: dict[str, Any] = {
        "model": str(models.first),
        "dtype": plan.dtype or ("float32" if on_cpu else "bfloat16"),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 256 << 20,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    return {**engine, **_for_both(plan.engine)}


def _for_both(given: Mapping[str, Any]) -> dict[str, Any]:
    """A user's options that stock vLLM gets, too."""
    only_pat = ("worker_extension_cls", "compilation_config", "enforce_eager", "max_model_len")
    return {name: value for name, value in given.items() if name not in only_pat}


def with_pat(
    session: Session,
    plan: Plan,
    graphs: Mapping[str, Any],
    models: Models,
    references: tuple[Reference, ...],
    on_cpu: bool,
) -> Session:
    """The session of an engine with PAT on the same requests."""
    engine = {**session.engine, **plan.engine}
    if "compilation_config" in graphs:
        engine.pop("enforce_eager", None)
    engine |= {
        **graphs,
        "max_model_len": session.engine["max_model_len"],
        **_pat(plan, on_cpu),
    }
    if graphs_wanted := "compilation_config" in graphs:
        engine.setdefault("worker_extension_cls", EXTENSION)
    if not on_cpu:
        engine["enable_sleep_mode"] = True
    if models.draft_lengths:
        engine["speculative_config"] = {
            "method": "ngram",
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
            "num_speculative_tokens": max(models.draft_lengths),
        }
    with suppress(KeyError):
        engine["compilation_config"] = {
            **plan.engine["compilation_config"],
            **graphs["compilation_config"],
        }
    return Session(
        engine,
        session.other_weights,
        session.prompts,
        session.max_tokens,
        references,
        models.draft_lengths,
        # A user's own extension is in the place of the one that tells.
        graphs=graphs_wanted and engine["worker_extension_cls"] == EXTENSION,
    )


def _pat(plan: Plan, on_cpu: bool) -> dict[str, Any]:
    """What makes an engine one with PAT, which switches only when it is told to."""
    pat = {**plan.pat, "policy": {"kind": "static", "tp": plan.layouts[0].tp}}
    pat.setdefault("kv_transfer", "migrate")
    if on_cpu:
        # So that weights can be updated, and rows change places as on GPUs.
        pat["weights"] = "inplace"
    return {
        "tensor_parallel_size": plan.ranks,
        "distributed_executor_backend": "pat",
        "additional_config": {"pat": pat},
    }


def timed_engine(models: Models, plan: Plan, on_cpu: bool, tp: int | None) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for an engine whose steps are timed.

    On GPUs it compiles and captures as vLLM does by default, or as the user's options say.

    Args:
        tp: of stock vLLM; None for PAT.
    """
    engine = self_test_engine(models, plan, on_cpu)
    if not on_cpu:
        del engine["enforce_eager"]
        chosen = ("compilation_config", "enforce_eager")
        engine |= {name: plan.engine[name] for name in chosen if name in plan.engine}
    # A process for each rank, also where there is one rank.
    stock = {"tensor_parallel_size": tp, "distributed_executor_backend": "mp"}
    engine |= _pat(plan, on_cpu) if tp is None else stock
    return {**engine, "worker_extension_cls": EXTENSION}
