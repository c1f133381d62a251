"""What a child of ours may do: `python -m tests.support.child_module` with a request."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pat_vllm.doctor.child import Events

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
"""A process that does not end with the one that has started it."""


def main(request: str, events: str) -> None:
    mode, lines = Path(request).read_text(), Events(events)
    if mode.startswith("starts another"):
        other = subprocess.Popen([sys.executable, "-c", STUBBORN])
        lines.tell(doing=str(other.pid))
        if mode.endswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    print("begins", flush=True)
    lines.tell(doing=mode)
    match mode:
        case "fine":
            lines.tell(answer=42)
        case "fails":
            sys.exit("last words")
        case "hangs":
            lines.file.write('{"doing": "not wh')  # and no more
            lines.file.flush()
            time.sleep(600)
        case "has nothing more to do":
            lines.tell(last=True)
            time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
