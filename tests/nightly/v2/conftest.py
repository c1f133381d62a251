"""What engines with Model Runner V2 run."""

from __future__ import annotations

from tests.engine.v2.conftest import served

__all__ = ["served"]
