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
from pat_vllm.gpus import Device
from pat_vllm.layout import Layout

MAX_TOKENS = 48
"""That each request of the self-test generates."""
POSITIONS = 4096
"""Of the random models: as many tokens as a request may have."""
_REQUESTS, _REQUESTS_ON_CPU = 256, 24
_LONG, _EACH_LONG = 2400, 32
"""Tokens of a long prompt, and of how many requests one has it."""
_ONLY_PAT = ("worker_extension_cls", "compilation_config", "enforce_eager", "max_model_len")
_SMALL = ("enforce_eager", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes")
"""Options that make an engine start soon."""


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

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of engines that are tested, the base layout first: all that options allow, since the
        models are not the user's."""
        return PATConfig.parse(self.pat).resolve_layouts(self.ranks)


def prompts(vocab: int, count: int = 6, longest: int = 40) -> Prompts:
    """Of the self-test's requests: 10 to 40 tokens, of some `longest` if that is more."""
    import random

    rng = random.Random(0)
    lengths = (
        longest if longest > 40 and at % _EACH_LONG == 0 else rng.randint(10, min(40, longest))
        for at in range(count)
    )
    return tuple(tuple(rng.randrange(3, vocab) for _ in range(length)) for length in lengths)


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

    Where the user names nothing, it has the defaults of vLLM and PAT. The second session says what
    is not so.
    """
    on_cpu = facts.platform == "cpu"
    default = self_test_engine(models, plan, on_cpu)
    engine = {name: value for name, value in default.items() if name not in _SMALL} | plan.engine
    if not 0 < (length := engine.get("max_model_len", POSITIONS)) <= POSITIONS:
        length = engine["max_model_len"] = POSITIONS
    if not on_cpu:
        engine.setdefault("enable_sleep_mode", True)
    else:
        # Ranks would not share what is free among them, and compiling takes minutes.
        engine.setdefault("kv_cache_memory_bytes", default["kv_cache_memory_bytes"])
        if "compilation_config" not in engine:
            engine.setdefault("enforce_eager", True)
    why = ""
    drafts = () if "speculative_config" in engine else models.draft_lengths
    if drafts:
        method = "ngram" if on_cpu and facts.runner != "V2" else "ngram_gpu"
        engine["speculative_config"] = _drafts(method, models)
        if method == "ngram":
            why = "; ngram_gpu needs a GPU or Model Runner V2"
    engine.setdefault("worker_extension_cls", EXTENSION)
    pat = dict(plan.pat)
    if "policy" in pat:  # its files are of the user's model
        files = ("profile", "lengths_file")
        pat["policy"] = {name: one for name, one in pat["policy"].items() if name not in files}
    engine |= _with_executor(pat, plan, on_cpu)
    count, longest = _REQUESTS_ON_CPU if on_cpu else _REQUESTS, min(_LONG, length - MAX_TOKENS - 1)
    session = Session(
        {**default, "max_model_len": length, "max_num_seqs": engine.get("max_num_seqs", count)},
        str(models.other),
        prompts(models.vocab, count, longest),
        MAX_TOKENS,
    )
    return session, replace(
        session,
        engine=engine,
        draft_lengths=drafts,
        graphs=not (on_cpu or {*_ONLY_PAT[:3]} & {*plan.engine}),
        sleeps=engine.get("enable_sleep_mode", on_cpu),
        as_used=f"not the user's: {_not_the_users(engine, plan)}{why}",
    )


def _not_the_users(engine: Mapping[str, Any], plan: Plan) -> str:
    """Options that differ, but for what makes the engine one of PAT's."""
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
    sizes = [layout.tp for layout in plan.layouts]
    pat = {**plan.pat, "base_tp": sizes[0], "layouts": sizes, "policy": {"kind": "static"}}
    pat.setdefault("kv_transfer", "migrate")
    if sizes[0] == 1:
        pat.setdefault("experts", "both")
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
