"""A pytest plugin that says which vLLM is imported."""

from __future__ import annotations

from pathlib import Path


def pytest_report_header() -> str:
    import vllm
    from vllm.version import __version__

    assert vllm.__file__ is not None
    return f"vLLM {__version__} of {Path(vllm.__file__).parents[1]}"
