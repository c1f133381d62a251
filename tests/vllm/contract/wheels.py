"""The Python files of a published vLLM, read out of its wheel without downloading all of it."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.models import cache_dir

CACHE = cache_dir() / "vllm-sources"
_READ_AHEAD = 4 << 20
"""Bytes asked for at once: a wheel's Python files mostly lie side by side."""
_TIMEOUT_SECONDS = 20


class Unavailable(Exception):
    """The wheel cannot be reached; the text says why."""


def vllm_sources(version: str, cache: Path = CACHE) -> Path:
    """The folder that holds the `vllm` package of a version: its .py files, nothing else.

    From the cache, else from the wheel on the package index that pip is configured for.

    Raises:
        Unavailable: neither.
    """
    folder = cache / version
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        try:
            extract_python(_open_wheel(_wheel_url(version), Path(scratch)), Path(scratch) / "out")
        except (OSError, zipfile.BadZipFile) as error:
            raise Unavailable(f"no wheel of vLLM {version}: {error}") from error
        try:
            (Path(scratch) / "out").rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def extract_python(wheel: io.BufferedIOBase, target: Path) -> None:
    """Write the Python files of vLLM's package to `target`, in the order in which they lie."""
    with wheel, zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if re.fullmatch(r"vllm/.+\.py", m.filename)]
        for member in sorted(members, key=lambda m: m.header_offset):
            archive.extract(member, target)


def _wheel_url(version: str) -> str:
    page = f"{_index_url().rstrip('/')}/vllm/"
    with _get(page, Accept="text/html") as answer:
        base, text = answer.geturl(), answer.read().decode()
    for href in re.findall(r"""<a\s[^>]*href=["']([^"']+)""", text):
        url, _ = urllib.parse.urldefrag(urllib.parse.urljoin(base, href))
        if re.search(rf"/vllm-{re.escape(version)}-[^/]+\.whl$", url):
            return url
    raise Unavailable(f"{page} lists no wheel of vLLM {version}")


def _index_url() -> str:
    """The package index that pip uses: its configuration and environment, else PyPI."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    urls = dict(re.findall(r"^(.+)\.index-url='(.*)'$", listed, flags=re.MULTILINE))
    return next(
        (urls[where] for where in (":env:", "install", "global") if where in urls),
        "https://pypi.org/simple",
    )


def _get(url: str, **headers: str) -> Any:
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        user = f"{parts.username}:{parts.password or ''}"
        token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)


def _open_wheel(url: str, scratch: Path) -> io.BufferedIOBase:
    """A wheel on a server; whole, in `scratch`, if the server does not send parts of files."""
    with _get(url, Range="bytes=0-0") as answer:
        if answer.status == 206:
            size = int(answer.headers["Content-Range"].rpartition("/")[2])
            return io.BufferedReader(_RemoteFile(url, size), _READ_AHEAD)
        with open(scratch / "wheel", "wb") as file:
            shutil.copyfileobj(answer, file)
        return open(scratch / "wheel", "rb")


class _RemoteFile(io.RawIOBase):
    """A file on a server that sends parts of files."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts: Mapping[int, int] = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = starts[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if self._at >= end:
            return 0
        with _get(self._url, Range=f"bytes={self._at}-{end - 1}") as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
