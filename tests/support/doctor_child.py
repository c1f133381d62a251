"""What a process of the doctor's may do: `python -m tests.support.doctor_child` with a request."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
"""A process that does not end with the one that has started it."""
LAST_WORDS = {
    "rank": "ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down",
    "memory": "ValueError: To serve at least one request with the model's max seq len (512), (1 "
    "GiB KV cache is needed, which is larger than the available KV cache memory (0.1 GiB).",
}


def main(request: str, answer: str, journal: str) -> None:
    mode = Path(request).read_text()
    if mode.startswith("starts another"):
        starts_another(Path(journal), killed=mode.endswith("killed"))
    with Path(journal).open("a") as file:
        file.write(json.dumps({"doing": "tp1dp2 -> tp2dp1"}) + "\n")
        file.flush()
        if mode == "fine":
            file.write(json.dumps({"check": {"name": "start", "found": "it is"}}) + "\n")
            Path(answer).write_text("42")
        elif mode == "hangs":
            file.write('{"check": {"na')  # and no more
            file.flush()
            time.sleep(600)
        elif mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            print(LAST_WORDS[mode], flush=True)
            check = {"name": "tp1dp2 -> tp2dp1", "problem": "EngineDeadError: it died\nmore"}
            file.write(json.dumps({"check": check}) + "\n")
            file.flush()
            if mode == "rank":
                time.sleep(600)  # its engine does not end
            sys.exit(1)


def starts_another(journal: Path, killed: bool) -> None:
    """Say the number of a process that goes on; then wait, or be killed."""
    other = subprocess.Popen([sys.executable, "-c", STUBBORN])
    with journal.open("a") as file:
        file.write(json.dumps({"doing": str(other.pid)}) + "\n")
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
