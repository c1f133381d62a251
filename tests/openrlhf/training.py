"""Runs the example of integrations/openrlhf, and reads what it prints."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.child import Child

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "integrations" / "openrlhf" / "examples" / "reinforce.sh"

SWITCHING: Mapping[str, Any] = {"policy": {"kind": "schedule", "switch_at": {"12": 2}}}
"""To one group of 2 ranks when 12 responses are left, as the example does."""

COLOCATED = (
    *("--train.colocate_all", "--actor.num_gpus_per_node", "2"),
    *("--vllm.enable_sleep", "--ds.enable_sleep", "--vllm.sync_backend", "nccl"),
)
"""Training and rollouts share two GPUs, weights go by CUDA IPC, and each side sleeps."""

_GONE_SECONDS = 150
_SILENCE = 300
"""Seconds. A dozen processes import OpenRLHF, DeepSpeed and vLLM at once."""
_ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@dataclass
class Training:
    """A run of the example, and what it has printed so far."""

    child: Child
    work: Path

    @property
    def log(self) -> str:
        return self.child.output

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What OpenRLHF reports of each training step."""
        return [
            ast.literal_eval(found) for found in re.findall(r"Global step \d+: (.*})", self.log)
        ]

    @property
    def rollouts(self) -> list[str]:
        """PAT's line about each rollout."""
        return re.findall(r"PAT rollout \d+: (.*)", self.log)

    def switches(self) -> list[int]:
        """How often the engine switched in each rollout."""
        return [line.count(" -> ") for line in self.rollouts]

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until `text` has been printed so often."""
        self.child.wait_for(lambda: self.log.count(text) >= times, repr(text))

    def succeed(self) -> None:
        """To the end of the training."""
        assert self.child.wait() == 0, self.tail()

    def tail(self) -> str:
        """The first errors, and the last that was printed."""
        errors = [line for line in self.log.splitlines() if re.search("ERROR|Error:", line)]
        return "\n".join([*errors[:30], "...", self.log[-4000:]])

    def processes(self, named: str = "") -> list[Any]:
        """What it has started and still runs: Ray, its workers, engines."""
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("WORK") == str(self.work)
                if mine and named in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def leaves_nothing(self) -> None:
        """All its processes end within a while after it."""
        give_up = time.monotonic() + _GONE_SECONDS
        while left := self.processes():
            assert time.monotonic() < give_up, f"still there: {left}"
            time.sleep(0.5)


@contextlib.contextmanager
def training(
    *arguments: str, pat: Mapping[str, Any] = SWITCHING, **environment: str
) -> Iterator[Training]:
    """Start the example with further arguments of OpenRLHF and options of PAT."""
    # Ray's sockets lie in it, and their paths must be short.
    with tempfile.TemporaryDirectory(
        prefix="pat-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        work = Path(folder)
        command = [str(EXAMPLE), "--vllm.pat", json.dumps(pat), *arguments]
        child = Child(command, work / "log", _SILENCE, env=_environment(work) | environment)
        run = Training(child, work)
        try:
            yield run
        finally:
            for process in run.processes():
                process.kill()
            child.kill()


def _environment(work: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")}
    return {
        **inherited,
        **_ENVIRONMENT,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "WORK": str(work),
        "RAY_TMPDIR": str(work),
    }
