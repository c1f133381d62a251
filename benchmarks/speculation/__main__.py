"""What speculative decoding costs and saves under PAT, on two ranks.

    python -m benchmarks.speculation static   a fixed draft length, against stock vLLM's: 1.03
    python -m benchmarks.speculation off      a draft length of 0, against no speculation: 1.01
    python -m benchmarks.speculation switch   a switch with drafts in flight, against one without:
                                              1.05
    python -m benchmarks.speculation change   a change of the draft length, against the same one in
                                              stock vLLM: no stall
    python -m benchmarks.speculation room     every fixed layout and draft length for the long tail

Each side of a ratio has the same method, length, prompts and concurrency. The model repeats itself,
so that drafts are accepted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import machine, write_results
from benchmarks.speculation import alternate, steps, switches, tail
from benchmarks.speculation.alternate import Size

DRAFTS = 4

Part = Callable[[str, bool], tuple[dict[str, Any], str]]


def _static(name: str, quick: bool) -> tuple[dict[str, Any], str]:
    return alternate.static(name, Size(8, 64, 2 if quick else 12), DRAFTS)


def _off(name: str, quick: bool) -> tuple[dict[str, Any], str]:
    return steps.off(name, 8, *((16, 3) if quick else (64, 24)), DRAFTS)


def _switch(name: str, quick: bool) -> tuple[dict[str, Any], str]:
    return switches.measure(name, 8, 4 if quick else 32, DRAFTS)


def _change(name: str, quick: bool) -> tuple[dict[str, Any], str]:
    return steps.change(name, 8, *((2, 2) if quick else (8, 8)), DRAFTS)


def _room(name: str, quick: bool) -> tuple[dict[str, Any], str]:
    return tail.measure(name, (2, 8), *((48, 1) if quick else (192, 3)))


PARTS: dict[str, Part] = {
    "static": _static,
    "off": _off,
    "switch": _switch,
    "change": _change,
    "room": _room,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--model", default="repeating")
    parser.add_argument("--quick", action="store_true", help="to see that it runs; writes no file")
    args = parser.parse_args()
    # At tp > 1 vLLM compiles one small function with C++: seconds of start on every side.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for part in args.parts:
        facts = machine()
        begun = time.perf_counter()
        body, text = PARTS[part](args.model, args.quick)
        body["seconds"] = round(time.perf_counter() - begun, 1)
        if args.quick:
            print(f"{part}, {body['seconds']} s\n\n{text}", flush=True)
        else:
            write_results(f"speculation-{part}", facts, body, text)


if __name__ == "__main__":
    main()
