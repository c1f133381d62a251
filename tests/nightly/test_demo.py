"""The demo as users start it, with each of its models; what is shown of an engine that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from pat_vllm.cli.demo_batch import make_batch, run_spec
from pat_vllm.cli.engine_run import RunFailed, run
from tests.engine.test_demo import check_demo
from tests.support.models import random_model


@pytest.mark.parametrize(
    ("model", "options"), [("qwen3", ()), ("repeating", ("--speculate",)), ("qwen3_moe", ())]
)
def test_demo_as_for_users(
    model: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_demo(model, options, tmp_path, monkeypatch)


def test_a_failed_engine_shows_its_last_words() -> None:
    batch = make_batch((4,), vocab=300, temperature=0.0, seed=0)
    spec = run_spec(random_model("qwen3"), 2, {"layouts": [3]}, batch, batch)
    with pytest.raises(RunFailed, match="layouts names tp=3"):
        run(spec, lambda result: None)
