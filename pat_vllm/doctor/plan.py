"""What a run of the doctor's looks at, and the engines that it starts for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.doctor.environment import Facts
from pat_vllm.doctor.in_workers import EXTENSION
from pat_vllm.doctor.session import Prompts, Session
from pat_vllm.layout import Layout
from pat_vllm.memory.rank_memory import GPU

MAX_TOKENS = 48
"""That each request of the self-test generates."""
POSITIONS = 4096
"""Of the random models: as many tokens as a request may have."""
_REQUESTS, _REQUESTS_ON_CPU = 256, 24
_LONG = (2049, 2500)
"""Tokens of a long prompt; one of `_REQUESTS_PER_LONG` requests has one."""
_REQUESTS_PER_LONG = 32
_ONLY_PAT = ("worker_extension_cls", "compilation_config", "enforce_eager", "max_model_len")
_LIMITS = ("enforce_eager", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes")
"""Options that make an engine start soon, which a user's engine does not have."""
_FILES = ("profile", "lengths_file")
"""Of a policy, made for the user's own model."""


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
    gpu: GPU | None
    machine: bool
    dtype: str | None
    all: bool
    figures: bool
    environment: Callable[[int, bool], Mapping[str, str]]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of the engine, the base layout first."""
        return PATConfig.parse(self.pat).resolve_layouts(self.ranks)


def prompts(vocab: int, count: int = 6) -> Prompts:
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


def self_test(models: Models, plan: Plan, on_cpu: bool) -> Session:
    """The session of stock vLLM that the stages of small engines are compared with."""
    engine = self_test_engine(models, plan, on_cpu)
    return Session(engine, str(models.other), prompts(models.vocab), MAX_TOKENS)


def _for_both(given: Mapping[str, Any]) -> dict[str, Any]:
    """A user's options that stock vLLM gets, too."""
    return {name: value for name, value in given.items() if name not in _ONLY_PAT}


def with_pat(
    session: Session,
    plan: Plan,
    graphs: Mapping[str, Any],
    models: Models,
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
        engine["speculative_config"] = _drafts("ngram", models)
    with suppress(KeyError):
        engine["compilation_config"] = {
            **plan.engine["compilation_config"],
            **graphs["compilation_config"],
        }
    return replace(
        session,
        engine=engine,
        draft_lengths=models.draft_lengths,
        # A user's own extension is in the place of the one that tells.
        graphs=graphs_wanted and engine["worker_extension_cls"] == EXTENSION,
    )


def _drafts(method: str, models: Models) -> dict[str, Any]:
    return {
        "method": method,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": max(models.draft_lengths),
    }


def as_used(models: Models, plan: Plan, facts: Facts) -> tuple[Session, Session]:
    """The sessions of stock vLLM, and of an engine as its user would have it, on many requests.

    That one has vLLM's and PAT's defaults where the user names nothing else. The second session
    says what it could not take from the user.
    """
    on_cpu = facts.platform == "cpu"
    # vLLM's CPU workers do not share what is free among them.
    limits = {*_LIMITS} - ({"kv_cache_memory_bytes"} if on_cpu else set())
    default = self_test_engine(models, plan, on_cpu)
    engine = {name: value for name, value in default.items() if name not in limits} | plan.engine
    stock = {**default, "max_model_len": engine.get("max_model_len", POSITIONS)}
    if "max_num_seqs" not in plan.engine:
        del stock["max_num_seqs"]
    told = []
    drafts = () if "speculative_config" in engine else models.draft_lengths
    if drafts:
        on_device = not on_cpu or facts.runner == "V2"
        engine["speculative_config"] = _drafts("ngram_gpu" if on_device else "ngram", models)
        if not on_device:
            told.append("drafts of ngram, as ngram_gpu needs a GPU or Model Runner V2")
    engine.setdefault("worker_extension_cls", EXTENSION)
    if not on_cpu:
        engine.setdefault("enable_sleep_mode", True)
    pat = dict(plan.pat)
    if "policy" in pat:
        pat["policy"] = {name: one for name, one in pat["policy"].items() if name not in _FILES}
    engine |= _with_executor(pat, plan, on_cpu)
    told.insert(0, f"not the user's: {_set_by_doctor(engine, plan)}")
    session = Session(
        stock,
        str(models.other),
        _long_prompts(models.vocab, on_cpu, stock["max_model_len"] - MAX_TOKENS - 1),
        MAX_TOKENS,
    )
    own = ("worker_extension_cls", "compilation_config", "enforce_eager")
    return session, replace(
        session,
        engine=engine,
        draft_lengths=drafts,
        graphs=not (on_cpu or any(name in plan.engine for name in own)),
        sleeps=engine.get("enable_sleep_mode", on_cpu),
        as_used="; ".join(told),
    )


def _long_prompts(vocab: int, on_cpu: bool, most: int) -> Prompts:
    """Some of them long; none has more than `most` tokens."""
    import random

    rng = random.Random(1)
    short = prompts(vocab, _REQUESTS_ON_CPU if on_cpu else _REQUESTS)
    return tuple(
        tuple(rng.randrange(3, vocab) for _ in range(min(most, rng.randint(*_LONG))))
        if number % _REQUESTS_PER_LONG == 0
        else prompt[:most]
        for number, prompt in enumerate(short)
    )


def _set_by_doctor(engine: Mapping[str, Any], plan: Plan) -> str:
    """Options that differ from a user's, but for what makes the engine one of PAT's."""
    pat = engine["additional_config"]["pat"]
    given = {**plan.engine, **{f"pat.{name}": one for name, one in plan.pat.items()}}
    has = {**engine, **{f"pat.{name}": one for name, one in pat.items()}}
    of_any = {"model", *_with_executor(pat, plan, on_cpu=False)}
    return ", ".join(
        f"{name}={has.get(name)!r}"
        for name in sorted({*has, *given} - of_any)
        if has.get(name) != given.get(name)
    )


def _pat(plan: Plan, on_cpu: bool) -> dict[str, Any]:
    """What makes an engine one with PAT, which switches only when it is told to."""
    pat = {**plan.pat, "policy": {"kind": "static", "tp": plan.layouts[0].tp}}
    pat.setdefault("kv_transfer", "migrate")
    return _with_executor(pat, plan, on_cpu)


def _with_executor(pat: dict[str, Any], plan: Plan, on_cpu: bool) -> dict[str, Any]:
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
