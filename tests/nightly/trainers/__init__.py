"""Trainers beside VeRL and OpenRLHF, by their own code."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need(package: str) -> None:
    """Skip where a trainer's package is missing: `make test-trainers` has all, and fails there."""
    if importlib.util.find_spec(package) is None:
        missing = f"{package} is not installed: integrations/install.sh trainers .venv-trainers"
        if os.environ.get("PAT_TEST_TRAINERS") == "1":
            pytest.fail(missing)
        pytest.skip(missing, allow_module_level=True)
