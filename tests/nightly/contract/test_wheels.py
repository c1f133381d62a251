"""Python files come out of a wheel by parts of it, or whole where a server sends no parts."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.vllm.contract import wheels

NATIVE = bytes(5 << 20)


def wheel() -> bytes:
    """A wheel whose native part is most of it, in front of the code and behind it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("vllm/_C.so", NATIVE)
        archive.writestr("vllm/__init__.py", "one = 1\n")
        archive.writestr("vllm/v1/request.py", "two = 2\n")
        archive.writestr("vllm/py.typed", "")
        archive.writestr("other/__init__.py", "")
        archive.writestr("vllm/_moe_C.so", NATIVE)
        archive.writestr("vllm-9.9.0.dist-info/METADATA", "Name: vllm\n")
    return made.getvalue()


class Index(BaseHTTPRequestHandler):
    """A package index with one wheel; `parts`: it sends parts of files."""

    wheel = wheel()
    parts = True
    sent = 0

    def do_GET(self) -> None:
        if self.path == "/simple/vllm/":
            link = '<a href="../../files/vllm-9.9.0-cp38-abi3-any.whl#sha256=0">vllm</a>'
            self._send(200, link.encode())
        elif self.path != "/files/vllm-9.9.0-cp38-abi3-any.whl":
            self._send(404, b"")
        elif self.parts:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self._send(206, self.wheel[first : last + 1], f"bytes {first}-{last}/{len(self.wheel)}")
        else:
            self._send(200, self.wheel)

    def _send(self, status: int, body: bytes, content_range: str | None = None) -> None:
        type(self).sent += len(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    """The index that pip is configured for."""

    class Fresh(Index):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(wheels, "_READ_AHEAD", 1 << 16)
    yield Fresh
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.mark.parametrize("parts", [True, False])
def test_python_files_only(index: type[Index], tmp_path: Path, parts: bool) -> None:
    index.parts = parts
    folder = wheels.vllm_sources("9.9.0", cache=tmp_path)
    files = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.*")}
    assert files == {"vllm/__init__.py": "one = 1\n", "vllm/v1/request.py": "two = 2\n"}
    assert (index.sent < len(NATIVE)) == parts
    assert [p.name for p in tmp_path.iterdir()] == ["9.9.0"]
    sent = index.sent
    assert wheels.vllm_sources("9.9.0", cache=tmp_path) == folder
    assert index.sent == sent, "the second time needs no network"


def test_a_version_that_is_not_there(index: type[Index], tmp_path: Path) -> None:
    with pytest.raises(wheels.Unavailable, match=r"lists no wheel of vLLM 1\.2\.3"):
        wheels.vllm_sources("1.2.3", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(wheels.Unavailable, match=r"no wheel of vLLM 0\.33\.0"):
        wheels.vllm_sources("0.33.0", cache=tmp_path)
