"""`pat-vllm profile` as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pat_vllm.layout import Layout
from pat_vllm.profile import Profile
from pat_vllm.profiling import load
from tests.support.engines import OPTIONS, engine, scheduler_of
from tests.support.models import random_model


def test_the_commands_profile_is_of_any_engine_with_its_flags(tmp_path: Path) -> None:
    """Also of one whose core has no process of its own."""
    path = tmp_path / "profile.json"
    options = {name: value for name, value in OPTIONS.items() if name != "seed"}
    options["enforce_eager"] = None
    flags = [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", value)
        if part is not None
    ]
    arguments = ["profile", random_model("qwen3"), *flags, "--budget", 60, "--output", path]
    done = subprocess.run(
        [sys.executable, "-c", "from pat_vllm.cli.app import app; app()", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saved = Profile.load(path)
    assert {s.layout for s in saved.steps} == {Layout(1, 2), Layout(2, 1)}
    assert path.name in done.stdout
    with engine("qwen3", 2, {}) as llm:
        scheduler = scheduler_of(llm)
        executor = scheduler.replica_set.executor
        loaded = load.load_or_measure(
            executor,
            scheduler.kv_cache_config,
            str(path),
            scheduler.replica_set.factory.seconds_to_make,
        )
        assert loaded == saved
