"""What differs between vLLM's releases where PAT relies on it.

python -m tests.vllm.contract.versions 0.30.0 0.31.0
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from tests.vllm.contract.behaviour import check_texts
from tests.vllm.contract.checker import CACHE, check
from tests.vllm.contract.wheels import vllm_sources


def rows(version: str) -> Iterator[tuple[str, str]]:
    """What a release lacks or does otherwise, and where of ours that is used.

    Raises:
        Unavailable: its wheel is not to be had.
    """
    sources = vllm_sources(version)
    places: dict[str, list[str]] = {}
    for problem in check(sources, CACHE / version).problems:
        place, _, text = problem.partition(": ")
        text = re.sub(r"; maybe .*", "", text)
        places.setdefault(text, []).append(f"`{place.partition(':')[0]}`")
    for text, files in places.items():
        yield text, ", ".join(dict.fromkeys(files))
    for text in check_texts(sources):
        name, _, why = re.sub(r"'.*' any more", "what it has later", text).partition(" (")
        yield f"`{name.split()[0]}` {name.partition(' ')[2]}", why.removesuffix(")")


def main(*versions: str) -> None:
    """Print a table for each version."""
    for version in versions:
        table = list(rows(version))
        print(f"## {version}\n")
        if not table:
            print("Nothing differs.\n")
            continue
        print("| what differs | where, or what rests on it |\n|---|---|")
        for what, where in table:
            print(f"| {what} | {where} |")
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
