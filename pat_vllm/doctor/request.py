"""What is asked of the doctor, and the engines that it starts for that. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from pat_vllm.config import PATConfig
from pat_vllm.doctor.models import POSITIONS, shape_named
from pat_vllm.files.reading import shown

_KV_BYTES = 256 << 20
"""KV cache of an engine whose memory is not the user's to choose: stock vLLM's, and any on CPU."""
_FILES = ("draft_history_file", "lengths_file", "profile")
"""Options with which PAT reads and writes files of the user's own model."""
_NOT_STOCK = frozenset(
    {
        "distributed_executor_backend",
        "enable_sleep_mode",
        "speculative_config",
        "tensor_parallel_size",
        "worker_extension_cls",
    }
)
"""Options of the engine with PAT that stock vLLM beside it does not get."""

DRAFTERS = ("mtp", "draft_model")
"""Drafters with weights that the doctor makes: an MTP module, and the model itself."""
DTYPES = ("float32", "bfloat16", "float16")
"""Of the random model's weights, and of what an engine computes."""

Engine = dict[str, Any]
"""Keyword arguments of `vllm.LLM`."""
Prompts = tuple[tuple[int, ...], ...]
"""Token ids, by request."""


@dataclass(frozen=True)
class Request:
    """The user's engine.

    Attributes:
        shape: of the random model in place of the user's, a name in `SHAPES`.
        engine: keyword arguments of `vllm.LLM`; `speculative_config` has drafts tested, too.
        pat: `additional_config["pat"]`.
        drafter: with weights, one of `DRAFTERS`; "": there is none.
    """

    ranks: int
    shape: str = "dense"
    engine: Engine = field(default_factory=dict)
    pat: dict[str, Any] = field(default_factory=dict)
    drafter: str = ""

    def check(self) -> None:
        """Refuse what no engine can be made of.

        Raises:
            ValueError: names the option, and what is allowed.
        """
        PATConfig.parse(self.pat).resolve_layouts(self.ranks)
        if (dtype := self.engine.get("dtype", DTYPES[0])) not in DTYPES:
            raise ValueError(f"--engine: dtype is {shown(dtype)}; allowed: {', '.join(DTYPES)}")
        if self.drafter:
            self._check_drafter()
        if shape_named(self.shape).tied and self.engine.get("speculative_config"):
            raise ValueError(
                f"--engine: speculative_config needs another --shape than {self.shape}"
            )

    def _check_drafter(self) -> None:
        if self.drafter not in DRAFTERS:
            allowed = ", ".join(DRAFTERS)
            raise ValueError(f"--drafter is {shown(self.drafter)}; allowed: {allowed}")
        if self.engine.get("speculative_config"):
            raise ValueError("--drafter and speculative_config in --engine exclude each other")
        if self.drafter == "mtp" and self.shape != "mtp":
            raise ValueError(f"--drafter mtp needs --shape mtp, not {self.shape}")

    def with_pat(self, model: str, on_cpu: bool) -> Engine:
        """The user's engine with a random model.

        What the user names is kept. By default an engine has every layout that `base_tp` allows,
        switches only when it is told to, and moves KV rather than computing it again.

        Args:
            model: folder of its checkpoint.
        """
        dtype = shape_named(self.shape).dtype or ("float32" if on_cpu else "bfloat16")
        engine: Engine = {"dtype": dtype, "max_model_len": POSITIONS, "seed": 0, **self.engine}
        if not 0 < engine["max_model_len"] <= POSITIONS:
            engine["max_model_len"] = POSITIONS
        if on_cpu:
            # Ranks would not share what is free among them, and compiling takes minutes.
            engine.setdefault("kv_cache_memory_bytes", _KV_BYTES)
            if "compilation_config" not in engine:
                engine.setdefault("enforce_eager", True)
        else:
            engine.setdefault("enable_sleep_mode", True)
        sizes = [layout.tp for layout in PATConfig.parse(self.pat).resolve_layouts(self.ranks)]
        pat = {"policy": {"kind": "static"}, "kv_transfer": "migrate", **_without_files(self.pat)}
        pat["policy"] = _without_files(pat["policy"])
        pat |= {"base_tp": sizes[0], "layouts": sorted({*sizes})}
        if on_cpu:  # so that weights can be updated, and rows change places as on GPUs
            pat["weights"] = "inplace"
        if self.drafter:
            of_target = {"model": model} if self.drafter == "draft_model" else {}
            drafts = {"method": self.drafter, "num_speculative_tokens": 2, **of_target}
            engine["speculative_config"] = drafts
        return engine | {
            "model": model,
            "skip_tokenizer_init": True,
            "tensor_parallel_size": self.ranks,
            "distributed_executor_backend": "pat",
            "additional_config": {**engine.get("additional_config", {}), "pat": pat},
        }


REQUEST = TypeAdapter(Request)


def stock_of(engine: Engine, requests: int) -> Engine:
    """The same without PAT, with tensor parallelism 1; compiled if the engine with PAT is.

    Compiled code rounds 16-bit numbers in other places than eager code.
    """
    stock = {name: value for name, value in engine.items() if name not in _NOT_STOCK}
    stock["additional_config"] = {
        name: value for name, value in engine["additional_config"].items() if name != "pat"
    }
    stock.setdefault("max_num_seqs", requests)
    return {**stock, "kv_cache_memory_bytes": _KV_BYTES}


def _without_files(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _FILES}


def prompts(vocab: int, count: int = 6, longest: int = 40) -> Prompts:
    """Random requests of 10 to 40 tokens; if `longest` is more, one in 32 has so many."""
    rng = random.Random(0)
    lengths = (
        longest if longest > 40 and at % 32 == 0 else rng.randint(10, min(40, longest))
        for at in range(count)
    )
    return tuple(tuple(rng.randrange(3, vocab) for _ in range(length)) for length in lengths)
