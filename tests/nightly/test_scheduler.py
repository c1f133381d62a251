"""Storms over schedulers, and what vLLM admits, with more seeds."""

from __future__ import annotations

import pytest

from tests.vllm.scheduler import test_admission, test_speculation


@pytest.mark.parametrize("seed", range(2, 12))
def test_storm(seed: int) -> None:
    test_speculation.test_storm(seed)


@pytest.mark.parametrize("seed", range(1, 6))
def test_storm_with_preemptions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_speculation.test_storm_with_preemptions(seed, monkeypatch)


@pytest.mark.parametrize("seed", range(2, 8))
def test_what_vllm_admits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_admission.test_what_vllm_admits(monkeypatch, seed)
