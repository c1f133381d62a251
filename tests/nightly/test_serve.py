"""`vllm serve` as users start it; what it does is in `tests/engine/test_serve.py`."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.support.serve import PATIENCE, Server


def test_vllm_serve_starts_as_for_users(tmp_path: Path) -> None:
    policy = {"kind": "schedule", "switch_at": {"2": 2}}
    server = Server(tmp_path / "serve.log", {"policy": policy})
    try:
        server.wait_until_ready()
        assert [tokens for _, tokens in server.complete([60, 120, 180], stream=True)] == [
            *(60, 120, 180)
        ]
        assert "PAT switched tp1dp2 -> tp2dp1 (policy)" in server.child.output
        assert len(server.family) == 4  # front end, engine core, two workers
        assert server.stop() == 0
        _, left = psutil.wait_procs(server.family, timeout=PATIENCE)
        assert not left
    finally:
        server.kill()
