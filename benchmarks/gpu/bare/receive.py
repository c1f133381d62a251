"""On the bare machine, put pieces together: `python -m benchmarks.gpu.bare.receive [PART]`.

To be run for each load that is carried there. Pieces are kept outside of the checkout, until all
have come. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
from pathlib import Path

KEPT = Path(os.environ.get("PAT_BARE", "/tmp/pat-bare"))
"""Outside of the checkout, which is replaced."""
FOLDERS = {
    part: Path(__file__).resolve().parents[3] / "build" / folder
    for part, folder in (("vllm", "bare"), ("flashinfer", "bare-flashinfer"))
}
"""Of the pieces of each part."""
SITES = {part: KEPT / part for part in FOLDERS}


def receive(carried: Path, kept: Path, site: Path) -> list[str]:
    """Keep the pieces that were carried here; unpack them when all have come.

    Args:
        carried: folder with `SUMS` and some of the pieces.
        kept: folder for pieces, empty afterwards if they were unpacked.
        site: folder to unpack to, which is replaced.

    Returns:
        Names of pieces that have not come yet.

    Raises:
        ValueError: pieces are damaged, or of another archive.
    """
    lines = [line.split() for line in (carried / "SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    kept.mkdir(parents=True, exist_ok=True)
    for name in sums:
        if (carried / name).exists():
            shutil.move(carried / name, kept / name)
    come = [kept / name for name in sums if (kept / name).exists()]
    damaged = [
        path for path in come if hashlib.sha256(path.read_bytes()).hexdigest() != sums[path.name]
    ]
    if damaged:
        raise ValueError(f"damaged, carry again: {', '.join(path.name for path in damaged)}")
    if missing := [name for name in sums if kept / name not in come]:
        return missing
    shutil.rmtree(site, ignore_errors=True)
    with (kept / "whole").open("wb") as whole:
        for piece in come:
            whole.write(piece.read_bytes())
            piece.unlink()
    with tarfile.open(whole.name, "r:xz") as archive:
        archive.extractall(site, filter="data")
    Path(whole.name).unlink()
    return []


if __name__ == "__main__":
    (part,) = sys.argv[1:] or ["vllm"]
    waiting = receive(FOLDERS[part], KEPT / "pieces" / part, SITES[part])
    print(f"waiting for {', '.join(waiting)}" if waiting else f"unpacked to {SITES[part]}")
