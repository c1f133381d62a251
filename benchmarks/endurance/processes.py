"""An engine's processes, and what they hold."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
ROLES = ("front end", "engine core", "workers")
MIB = 2**20
OWN = "PSS without files, MiB"


def engine_processes(before: Iterable[psutil.Process] = ()) -> dict[str, list[psutil.Process]]:
    """Processes of the engine of this front end, by role, but for what was there `before`.

    vLLM names them when they start.
    """
    others = {process.pid for process in before}
    by_role: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
    by_role["front end"].append(psutil.Process())
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = process.cmdline()[:1]
            if process.pid in others or not title or not title[0].startswith("VLLM::"):
                continue
            by_role["engine core" if "EngineCore" in title[0] else "workers"].append(process)
    return by_role


def sample(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """What processes hold now: memory in MiB, numbers of all else.

    PSS counts a page that several processes share in equal parts. Pages of files are left out of
    it: other programs share those of libraries, and a part grows when such a program ends.

    Raises:
        psutil.NoSuchProcess: one has ended.
    """
    amounts: dict[str, float] = {}
    for role, members in processes.items():
        amounts[f"{role}: RSS, MiB"] = sum(process.memory_info().rss for process in members) / MIB
        amounts[f"{role}: {OWN}"] = sum(_own_memory(process.pid) for process in members) / MIB
        amounts[f"{role}: file descriptors"] = sum(process.num_fds() for process in members)
        amounts[f"{role}: threads"] = sum(process.num_threads() for process in members)
    everyone = [process for members in processes.values() for process in members]
    held = names_held(everyone)
    amounts["shared memory"] = sum(path.parent == SHARED_MEMORY for path in held)
    amounts["sockets and files"] = len(held) - amounts["shared memory"]
    # Whoever has been started since is counted, too.
    amounts["processes"] = len(psutil.Process().children(recursive=True))
    return amounts


def _own_memory(pid: int) -> int:
    """PSS of what is not a file's, bytes."""
    sums = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", sums, re.MULTILINE)
    assert len(fields) == 2, fields
    return 1024 * sum(map(int, fields))


def names_held(processes: Iterable[psutil.Process]) -> set[Path]:
    """Shared memory, sockets and temporary files of processes: names that may outlive them.

    Among them is the file by which vLLM's ranks meet, after which its shared memory is named.
    """
    # Of these alone a `Path` is made, which interns its parts: those of all that is mapped would
    # fill the interpreter's table of interned strings within minutes, and it then takes 7.3 MiB.
    shared, temporary = f"{SHARED_MEMORY}/", f"{tempfile.gettempdir()}/"
    names: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            files = {mapping.path for mapping in process.memory_maps()}
            names |= {name for name in files if name.startswith(shared)}
            others = {str(connection.laddr) for connection in process.net_connections(kind="unix")}
            others |= {file.path for file in process.open_files()}
            names |= {name for name in others if name.startswith(temporary)}
    held = {Path(name) for name in names}
    met = {match[0] for path in held if (match := re.match(r"vllm_dist_\w+", path.name))}
    return {path for path in held | {Path(temporary + name) for name in met} if path.exists()}


def left_in_memory(held: Iterable[Path]) -> list[str]:
    """Shared memory, of what an engine held, that is still there."""
    return [str(path) for path in sorted(held) if path.parent == SHARED_MEMORY and path.exists()]
