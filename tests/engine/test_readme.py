"""The README's first example runs as it is printed, from a shell as a newcomer has it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.child import Child

ROOT = Path(__file__).parents[2]


def printed(language: str = "") -> list[str]:
    """The README's code of a language; of none, what is typed into a shell."""
    text = (ROOT / "README.md").read_text().replace("\n> ", "\n")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [code for named, code in blocks if named == language]


def test_the_first_example(tmp_path: Path) -> None:
    """No option and no variable is missing."""
    (tmp_path / "example.py").write_text(printed("python")[0])
    typed = "".join(printed()).splitlines()
    # What installs and uninstalls has been done.
    lines = [line for line in typed if line.startswith(("pat-vllm random-model", "export "))]
    assert [line.split()[0] for line in lines] == ["pat-vllm", "export"], typed
    assert any("pip uninstall --yes torchvision torchaudio torchcodec" in line for line in typed)
    # As users have it, rather than as tests/conftest.py sets it.
    ours = (
        *("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"),
        *("VLLM_WORKER_MULTIPROC_METHOD", "TORCHDYNAMO_DISABLE"),
    )
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["PAT_CACHE_DIR"] = str(tmp_path / "cache")
    script = "\n".join(["set -eu", *lines, "python example.py"])
    child = Child(["bash", "-c", script], tmp_path / "log", cwd=tmp_path, env=environment)
    try:
        assert child.wait() == 0, child.tail()
    finally:
        child.kill()
    output = child.output
    assert re.search(r"16 requests at most, 2 ranks, [\d.]+ s; \d+ switch(es)? in", output), output
    assert re.search(r"^  batch ended at ", output, re.MULTILINE), output
    assert "now in tp1dp2" in output or "now in tp2dp1" in output
