"""Pack what a bare machine lacks into pieces: `python -m benchmarks.gpu.bare.pack [PART]`.

vLLM's CUDA wheel for x86-64, less what a dense 16-bit model does not use on Hopper, and the wheels
that it and the tests need, for Python 3.12; or, apart from it, FlashInfer's sources for Hopper.
Pieces go below `build/`, which git ignores.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from benchmarks.gpu.bare.receive import FOLDERS

ROOT = Path(__file__).resolve().parents[3]
SUMS = "SUMS"

REQUIRED = """
annotated_types==0.8.0 apache_tvm_ffi==0.1.15.post2 astor==0.8.1 blake3==1.0.11
cachetools==8.0.1 cbor2==6.3.0 compressed_tensors==0.17.0 depyf==0.20.0 dill==0.4.1
fastapi==0.136.3 httpcore2==2.16.2 httpx2==2.16.2 ijson==3.6.0 interegular==0.3.3 jiter==0.19.0
jsonschema==4.26.0 jsonschema_specifications==2025.9.1 lark==1.2.2 lightgbm==4.7.0
llguidance==1.7.6 lm_format_enforcer==0.11.3 loguru==0.7.3 msgspec==0.22.0 multidict==7.2.1
openai==3.54.0 orjson==3.13.0
opentelemetry_api==1.45.2 opentelemetry_sdk==1.45.2 opentelemetry_semantic_conventions==0.66b2
opentelemetry_semantic_conventions_ai==0.5.1 oss_harmony==0.0.11 outlines_core==0.2.14
partial_json_parser==0.2.1.1.post7 prometheus_fastapi_instrumentator==8.1.0 pybase64==1.5.1
pydantic==2.14.3 pydantic_core==2.50.4 pydantic_extra_types==2.11.1 pydantic_settings==2.16.3
python_dotenv==1.2.4 python_json_logger==4.2.0 python_multipart==0.0.34 pyzmq==27.3.0
referencing==0.37.0 rpds_py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0
typing_inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 xgrammar==0.2.8
execnet hypothesis iniconfig pluggy pytest>=8,<9.2 pytest-timeout>=2.3 pytest-xdist>=3.6
sortedcontainers
"""
"""Without their dependencies: what vLLM 0.32 and 0.33, PAT and `tests/gpu` import beside what comes
with torch 2.11, Triton, transformers, typer, matplotlib and scipy, which the machine has. A dense
16-bit model runs without flashinfer, tilelang, cutlass-dsl, quack-kernels, torchcodec,
PyNvVideoCodec, ray, mistral_common, anthropic, mcp and exporters of telemetry."""
LEFT_OUT = (
    "*.data/scripts/*",
    "*.cuh",
    "*.h",
    "*.hpp",
    "*.inl",
    "vllm/vllm-rs",
    # For other GPUs, attention of other kinds, and fewer bits.
    "vllm/_deepselect_C.*",
    "vllm/_flash*_C.*",
    "vllm/_qutlass_C.*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/flashmla/*",
    "vllm/third_party/tml_fa4/*",
    "vllm/vllm_flash_attn/_vllm_fa2_C.*",
    "vllm/entrypoints/serve/instrumentator/static/*",
    "vllm/kernels/helion/configs/*",
)
"""Patterns of paths in wheels. FlashAttention 3 stays."""
EXPERTS = ("vllm/_moe_C_*",)  # kernels for mixtures: 38 MB


# As vLLM 0.32 pins it, and what its attention and sampling import.
FLASHINFER = "flashinfer-python==0.7.0.post1 click tabulate cuda_tile nvidia_cudnn_frontend"
OF_FLASHINFER = (
    "flashinfer/data/csrc/fused_moe/*",
    "flashinfer/data/csrc/*sm1[0-9][0-9]*",
    "flashinfer/data/csrc/*sm_1[0-9][0-9]*",
    "flashinfer/data/cutlass/examples/*",
    "flashinfer/data/cutlass/test/*",
)
"""What is left out: experts' kernels, and those for other GPUs."""


def download(wheels: Path, required: Sequence[str]) -> None:
    """Have pip fetch the wheels."""
    tags = [f"manylinux_2_{glibc}_x86_64" for glibc in range(39, 4, -1)]
    tags += [f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    command += [f"--platform={tag}" for tag in tags]
    subprocess.run([*command, f"--dest={wheels}", *required], check=True)


def contents(wheels: Iterable[Path], left_out: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Paths and bytes of what wheels hold, but for what is left out."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for path in archive.namelist():
                if path.endswith("/") or any(
                    fnmatch.fnmatch(path, pattern) for pattern in left_out
                ):
                    continue
                yield path, archive.read(path)


def plugin() -> Iterator[tuple[str, bytes]]:
    """By what vLLM finds PAT, whose code is the checkout's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = "pat_vllm-0.dist-info"
    yield f"{folder}/METADATA", b"Metadata-Version: 2.1\nName: pat-vllm\nVersion: 0\n"
    group = "vllm.general_plugins"
    points = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    yield f"{folder}/entry_points.txt", "\n".join([f"[{group}]", *points, ""]).encode()


def pack(files: Iterable[tuple[str, bytes]], folder: Path, most: int) -> list[Path]:
    """Write pieces of at most `most` bytes, and their checksums.

    Args:
        files: path and bytes of each.
        folder: older pieces in it are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("piece.*"):
        old.unlink()
    whole, sums = folder / "whole", ""
    pieces: list[Path] = []
    with tarfile.open(whole, "w:xz", preset=2) as archive:
        for path, data in files:
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with whole.open("rb") as file:
        while data := file.read(most):
            pieces.append(folder / f"piece.{len(pieces):02}")
            pieces[-1].write_bytes(data)
            sums += f"{hashlib.sha256(data).hexdigest()}  {pieces[-1].name}\n"
    whole.unlink()
    (folder / SUMS).write_text(sums)
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bare.pack", description=__doc__)
    parser.add_argument("part", nargs="?", choices=tuple(FOLDERS), default="vllm")
    parser.add_argument("--vllm", default="0.32.0", help="version")
    parser.add_argument("--experts", action="store_true", help="also kernels for experts, 38 MB")
    parser.add_argument("--piece", type=int, default=50_000_000, help="bytes of a piece, at most")
    given = parser.parse_args()
    required = [f"vllm=={given.vllm}", *REQUIRED.split()]
    left_out = [*LEFT_OUT, *(() if given.experts else EXPERTS)]
    if given.part == "flashinfer":
        required, left_out = FLASHINFER.split(), [*OF_FLASHINFER]
    with tempfile.TemporaryDirectory() as folder:
        download(wheels := Path(folder), required)
        files = contents(sorted(wheels.glob("*.whl")), left_out)
        if given.part == "vllm":
            files = chain(files, plugin())
        pieces = pack(files, FOLDERS[given.part], given.piece)
    for path in (*pieces, FOLDERS[given.part] / SUMS):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
