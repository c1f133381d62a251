"""Our code against the types of a vLLM, by mypy. vLLM's source is analysed, and never imported.

`make lint` takes whatever comes from vLLM for `Any`; here it has the types that it has there. torch
stays `Any`, except for `torch.nn.Module` (`stubs/`), and so do parts of vLLM that none of our
objects comes from. What mypy has analysed is kept beside the test models, for every checkout.
"""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.models import cache_dir

ROOT = Path(__file__).resolve().parents[3]
CACHE = cache_dir() / "vllm-types"
FOLDERS = (ROOT, ROOT / "integrations" / "verl", ROOT / "integrations" / "openrlhf")
_CONFIG = """
[mypy]
python_version = 3.11
mypy_path = {path}
explicit_package_bases = true
check_untyped_defs = true
ignore_missing_imports = true
sqlite_cache = true
enable_error_code = explicit-override

[mypy-vllm.*]
ignore_errors = true
check_untyped_defs = false

[mypy-torch.*]
follow_imports = skip

[mypy-{parts}]
follow_imports = skip

[mypy-{needed}]
follow_imports = normal

[mypy-{others}]
follow_imports = skip
follow_imports_for_stubs = true
"""
_OTHERS = (
    "transformers tokenizers ray openai verl openrlhf hydra tensordict datasets pandas triton "
    "scipy matplotlib lightgbm fastapi starlette PIL cv2 sympy huggingface_hub xgrammar "
    "mistral_common anthropic numba opentelemetry aiohttp uvicorn rich typer mcp "
    "anyio cryptography dns filelock gguf h11 httpcore2 httpx2 jinja2 llguidance requests urllib3"
)
"""Packages that are `Any`, for speed."""
_PARTS = (
    "compilation.passes distributed.aux_output_connector distributed.ec_transfer distributed.eplb "
    "entrypoints lora model_executor.layers.mamba "
    "model_executor.layers.quantization model_executor.models models parser reasoning renderers "
    "third_party tool_parsers transformers_utils v1.hisparse"
)
"""Packages of vLLM's that are `Any`, too, but for what our code imports from them."""
_BASES = ("vllm.model_executor.layers.quantization.base_config",)
"""Modules in them from which classes inherit that our code uses."""
_ERROR = re.compile(r"(?P<path>[^:]+):(?P<line>\d+): error: (?P<text>.*)  \[(?P<code>[a-z-]+)\]")

_ENGINE_CORE = Path("vllm/v1/engine/core.py")
_ASKED = """
from pat_vllm.executor.executor import PATExecutor
from pat_vllm.scheduler.scheduler import PATScheduler

def asked(scheduler: PATScheduler, model_executor: PATExecutor) -> tuple[object, ...]:
    return ({names},)
"""
"""A module that asks our objects for what vLLM's engine core asks them for."""


@dataclass(frozen=True)
class Found:
    """What mypy makes of our code with a vLLM.

    Attributes:
        problems: lines: file and line of ours, and what does not fit.
        overrides: methods of ours that replace one of vLLM's: file, line and name.
    """

    problems: tuple[str, ...]
    overrides: frozenset[str]


def check(root: Path, cache: Path, instead: Mapping[Path, Path] | None = None) -> Found:
    """Check our code against the vLLM in the folder `root`.

    Args:
        cache: folder that makes the next run of the same kind faster.
        instead: files to be read in the place of vLLM's own.
    """
    instead = instead or {}
    core = instead.get(root / _ENGINE_CORE, root / _ENGINE_CORE).read_text()
    asked = sorted(set(re.findall(r"\bself\.((?:scheduler|model_executor)\.\w+)", core)))
    folder = cache / "made"  # mypy knows files by their paths
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine_core.py").write_text(_ASKED.format(names=", ".join(asked)))
    config = folder / "mypy.ini"
    path = (Path(__file__).parent / "stubs", folder, root, *FOLDERS)
    others = ",".join(f"{name}.*" for name in _OTHERS.split())
    parts = ",".join(f"vllm.{part}.*" for part in _PARTS.split())
    needed = ",".join(sorted({*_BASES, *_imported()}))
    config.write_text(
        _CONFIG.format(path=":".join(map(str, path)), parts=parts, needed=needed, others=others)
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    command += ["--cache-dir", str(cache)]
    for stock, doctored in instead.items():
        command += ["--shadow-file", str(stock), str(doctored)]
    command += ["-p", "pat_vllm", "-p", "pat_verl", "-p", "pat_openrlhf"]
    command += ["-m", "tests.vllm.contract.spelled", "-m", "engine_core"]
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1) and not ran.stderr, ran.stderr or ran.stdout
    problems: list[str] = []
    overrides: set[str] = set()
    for line in ran.stdout.splitlines():
        if (error := _ERROR.fullmatch(line)) is None:
            continue
        where = f"{error['path']}:{error['line']}"
        if error["code"] != "explicit-override":
            problems.append(f"{where}: {error['text']}")
        elif override := re.search(r'Method "(\w+)" .* in class "vllm\.', error["text"]):
            overrides.add(f"{where}: {override[1]}")
    return Found(tuple(problems), frozenset(overrides))


def _imported() -> Iterator[str]:
    """Modules of vLLM's that our code imports, and names that may be modules."""
    files = [file for folder in FOLDERS for file in folder.glob("pat_*/**/*.py")]
    for file in (*files, Path(__file__).with_name("spelled.py")):
        for module, names in re.findall(
            r"^\s*from (vllm\.[\w.]+) import ([\w, ]*)", file.read_text(), re.M
        ):
            yield module
            yield from (f"{module}.{name.strip()}" for name in names.split(",") if name.islower())
        yield from re.findall(r"^\s*import (vllm\.[\w.]+)", file.read_text(), re.M)
