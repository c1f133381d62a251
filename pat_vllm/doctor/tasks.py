"""The engines that the stages start, and what they are asked. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.doctor.doctor_options import Options
from pat_vllm.doctor.engine import Task
from pat_vllm.doctor.environment import EnvironmentFacts
from pat_vllm.doctor.serving import MAX_TOKENS, Prompts
from pat_vllm.predictor.draft_schedule import ngram_config

POSITIONS = 4096
"""Of the random models: as many tokens as a request may have."""
_REQUESTS, _REQUESTS_ON_CPU = 256, 24
_LONG, _EACH_LONG = 2400, 32
"""Tokens of a long prompt, and of how many requests one has it."""
_SMALL = {
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 256 << 20,
}
"""Makes an engine start soon."""
_NOT_STOCK = frozenset(
    {
        "tensor_parallel_size",
        "distributed_executor_backend",
        "speculative_config",
        "enable_sleep_mode",
        "worker_extension_cls",
    }
)


@dataclass(frozen=True)
class Models:
    """Two random models of one shape, for the self-test: folders, and the size of their vocabulary.

    Attributes:
        first, other: checkpoints.
        vocab: ids of prompts are below it.
        draft_lengths: to go through, where the engine is to speculate.
        dtype: that they ask for; None: any.
    """

    first: Path
    other: Path
    vocab: int
    draft_lengths: tuple[int, ...] = ()
    dtype: str | None = None

    def engine(self, options: Options, facts: EnvironmentFacts) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM` that a random model asks for."""
        dtype = options.dtype or self.dtype or ("float32" if facts.on_cpu else "bfloat16")
        return {
            "model": str(self.first),
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "seed": 0,
        }


def prompts(vocab: int, count: int = 6, longest: int = 40) -> Prompts:
    """Of the self-test's requests: 10 to 40 tokens, of some `longest` if that is more."""
    rng = random.Random(0)
    lengths = (
        longest if longest > 40 and at % _EACH_LONG == 0 else rng.randint(10, min(40, longest))
        for at in range(count)
    )
    return tuple(tuple(rng.randrange(3, vocab) for _ in range(length)) for length in lengths)


def engine_as_given(model: str, options: Options) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for the user's engine with PAT, with a model in its place."""
    engine = {**options.engine, "model": model, "skip_tokenizer_init": True}
    return _with_pat(engine, options.pat, options.ranks, on_cpu=False)


def stock_of(task: Task, **changed: Any) -> Task:
    """The same of stock vLLM with tensor parallelism 1, compiled if the engine with PAT is.

    Compiled code rounds 16-bit numbers in other places than eager code, and so do sums of ranks.
    """
    rounding_tp = 1 if task.engine["dtype"] == "float32" else task.engine["tensor_parallel_size"]
    engine = {name: value for name, value in task.engine.items() if name not in _NOT_STOCK}
    additional = {k: v for k, v in engine.pop("additional_config").items() if k != "pat"}
    if additional:
        engine["additional_config"] = additional
    return Task({**engine, **changed}, task.other_weights, task.prompts, rounding_tp=rounding_tp)


def self_test(
    options: Options, models: Models, facts: EnvironmentFacts, cudagraph_mode: str | None
) -> tuple[Task, Task]:
    """Stock vLLM, and a small engine with PAT which switches only when it is told to.

    Args:
        cudagraph_mode: None is an engine without compiler and graphs.
    """
    engine = {**models.engine(options, facts), **_SMALL, **options.engine}
    engine |= {"enforce_eager": True, "max_model_len": _SMALL["max_model_len"]}
    if cudagraph_mode is not None:
        del engine["enforce_eager"]
        given = options.engine.get("compilation_config", {})
        engine["compilation_config"] = {**given, "cudagraph_mode": cudagraph_mode}
    if not facts.on_cpu:
        engine["enable_sleep_mode"] = True
    if models.draft_lengths:
        engine["speculative_config"] = ngram_config(max(models.draft_lengths))
    # All layouts that the options allow, since the model is not the user's.
    layouts = PATConfig.parse(options.pat).resolve_layouts(options.ranks)
    sizes = [layout.tp for layout in layouts]
    pat = {"kv_transfer": "migrate", **options.pat}
    pat |= {"base_tp": sizes[0], "layouts": sizes, "policy": {"kind": "static"}}
    task = Task(
        _with_pat(engine, pat, options.ranks, facts.on_cpu),
        str(models.other),
        prompts(models.vocab),
        draft_lengths=models.draft_lengths,
        graphs=cudagraph_mode is not None,
    )
    return stock_of(task), task


def as_used(options: Options, models: Models, facts: EnvironmentFacts) -> tuple[Task, Task]:
    """Stock vLLM, and an engine as its user would have it, on many requests.

    Where the user names nothing, it has the defaults of vLLM and PAT. The task says what is not so.
    """
    on_cpu = facts.on_cpu
    engine = {**models.engine(options, facts), **options.engine}
    if not 0 < (length := engine.get("max_model_len", POSITIONS)) <= POSITIONS:
        length = engine["max_model_len"] = POSITIONS
    if not on_cpu:
        engine.setdefault("enable_sleep_mode", True)
    else:
        # Ranks would not share what is free among them, and compiling takes minutes.
        engine.setdefault("kv_cache_memory_bytes", _SMALL["kv_cache_memory_bytes"])
        if "compilation_config" not in engine:
            engine.setdefault("enforce_eager", True)
    why = ""
    drafts = () if "speculative_config" in engine else models.draft_lengths
    if drafts:
        method = "ngram" if on_cpu and facts.runner != "V2" else "ngram_gpu"
        engine["speculative_config"] = ngram_config(max(drafts), method)
        if method == "ngram":
            why = "; ngram_gpu needs a GPU or Model Runner V2"
    pat = dict(options.pat)
    pat.pop("state_dir", None)
    if "policy" in pat:  # a profile is of the user's model
        pat["policy"] = {name: value for name, value in pat["policy"].items() if name != "profile"}
    engine = _with_pat(engine, pat, options.ranks, on_cpu)
    count = _REQUESTS_ON_CPU if on_cpu else _REQUESTS
    task = Task(
        engine,
        str(models.other),
        prompts(models.vocab, count, min(_LONG, length - MAX_TOKENS - 1)),
        draft_lengths=drafts,
        graphs=not on_cpu and not {"compilation_config", "enforce_eager"} & options.engine.keys(),
        sleeps=engine.get("enable_sleep_mode", on_cpu),
        as_used=f"not the user's: {_not_the_users(engine, options)}{why}",
    )
    stock = stock_of(
        task,
        max_model_len=length,
        max_num_seqs=engine.get("max_num_seqs", count),
        kv_cache_memory_bytes=_SMALL["kv_cache_memory_bytes"],
    )
    return stock, task


def _not_the_users(engine: Mapping[str, Any], options: Options) -> str:
    """Options that differ, but for what makes the engine one of PAT's."""

    def flat(engine: Mapping[str, Any], pat: Mapping[str, Any]) -> dict[str, Any]:
        return {**engine, **{f"pat.{name}": value for name, value in pat.items()}}

    given = flat(options.engine, options.pat)
    has = flat(engine, engine["additional_config"]["pat"])
    of_any = {"model", "tensor_parallel_size", "distributed_executor_backend", "additional_config"}
    return ", ".join(
        f"{name}={has.get(name)!r}"
        for name in sorted({*has, *given} - of_any)
        if has.get(name) != given.get(name)
    )


def _with_pat(
    engine: dict[str, Any], pat: dict[str, Any], ranks: int, on_cpu: bool
) -> dict[str, Any]:
    # On CPU, so that weights can be updated, and rows change places as on GPUs.
    weights = {"weights": "inplace"} if on_cpu else {}
    return {
        **engine,
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": "pat",
        "additional_config": {**engine.get("additional_config", {}), "pat": {**pat, **weights}},
    }
