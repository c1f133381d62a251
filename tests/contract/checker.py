"""Our code against the types of a vLLM, by mypy. vLLM's source is analysed, and never imported.

`make lint` takes whatever comes from vLLM for `Any`; here it has the types that it has there. torch
stays `Any`, except for `torch.nn.Module` (`stubs/`).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "vllm-types"
OURS = ("pat_vllm", "pat_verl", "pat_openrlhf", "tests.contract.spelled")
FOLDERS = (ROOT, ROOT / "integrations" / "verl", ROOT / "integrations" / "openrlhf")
_ASKING = "vllm.v1.engine.core"
"""vLLM's module that uses a scheduler and an executor of ours; asks for what their bases have."""
_CONFIG = """
[mypy]
python_version = 3.11
mypy_path = {path}
explicit_package_bases = true
namespace_packages = true
check_untyped_defs = true
ignore_missing_imports = true
sqlite_cache = true
enable_error_code = explicit-override

[mypy-vllm.*]
ignore_errors = true
check_untyped_defs = false

[mypy-{asking}]
ignore_errors = false

[mypy-{others}]
follow_imports = skip
follow_imports_for_stubs = true
"""
_OTHERS = (
    "transformers tokenizers ray openai verl openrlhf hydra tensordict datasets pandas triton "
    "scipy matplotlib lightgbm fastapi starlette PIL cv2 sympy huggingface_hub xgrammar "
    "mistral_common anthropic numba opentelemetry aiohttp uvicorn rich typer mcp"
)
"""Packages that are `Any`, for speed."""
_ERROR = re.compile(r"(?P<path>[^:]+):(?P<line>\d+): error: (?P<text>.*)  \[(?P<code>[a-z-]+)\]")


@dataclass(frozen=True)
class Found:
    """What mypy makes of our code with a vLLM.

    Attributes:
        problems: lines: file and line of ours, what does not fit.
        overrides: methods of ours, as file, line and name, that replace one of vLLM's.
    """

    problems: tuple[str, ...]
    overrides: frozenset[str]


def check(root: Path, cache: Path | None, instead: Mapping[Path, Path] | None = None) -> Found:
    """Check our code against the vLLM in the folder `root`.

    Args:
        cache: folder that makes the next run faster; None: none.
        instead: files to be read in the place of vLLM's own.
    """
    folders = (ROOT / "tests" / "contract" / "stubs", root, *FOLDERS)
    config = _CONFIG.format(
        path=":".join(map(str, folders)),
        asking=_ASKING,
        others=",".join(f"{name}.*" for name in _OTHERS.split()),
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(config)
        file.flush()
        command = [sys.executable, "-m", "mypy", "--config-file", file.name]
        command += ["--cache-dir", str(cache) if cache else "/dev/null"]
        for stock, doctored in (instead or {}).items():
            command += ["--shadow-file", str(stock), str(doctored)]
        for name in OURS:
            command += ["-p" if "." not in name else "-m", name]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1) and not ran.stderr, ran.stderr or ran.stdout
    asking = f"{_ASKING.replace('.', '/')}.py"
    problems: list[str] = []
    overrides: set[str] = set()
    for line in ran.stdout.splitlines():
        if (error := _ERROR.fullmatch(line)) is None:
            continue
        path, number, text, code = error.group("path", "line", "text", "code")
        if code == "explicit-override":
            if not path.endswith(asking) and (
                override := re.search(r'Method "(\w+)" .* in class "vllm\.', text)
            ):
                overrides.add(f"{path}:{number}: {override[1]}")
        elif not path.endswith(asking):
            problems.append(f"{path}:{number}: {text}")
        elif re.match('"(SchedulerInterface|Executor)" has no attribute', text):
            problems.append(f"vLLM's engine core, line {number}: {text}")
    return Found(tuple(problems), frozenset(overrides))
