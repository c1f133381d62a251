"""Profiles that engines took at their start, kept for the next start. Pure but for the files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat_vllm.files import make_private
from pat_vllm.profiling.profile import Profile, ProfileError

logger = logging.getLogger(__name__)

CACHE_DIR = "PAT_CACHE_DIR"
"""Environment variable that names another directory than the user's cache directory."""


def cache_dir() -> Path:
    """Where PAT may keep what it can make again."""
    if given := os.environ.get(CACHE_DIR):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pat-vllm"


def cache_path(key: Mapping[str, Any]) -> Path:
    """The file of the profile for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "profiles" / f"{digest}.json"


def find(key: Mapping[str, Any]) -> Profile | None:
    """The cached profile for a key, if there is one.

    A damaged file is reported and counts as missing.
    """
    path = cache_path(key)
    if not os.path.exists(path):
        return None
    try:
        profile = Profile.load(path)
        profile.check(key, path)
    except ProfileError as error:
        logger.warning("PAT measures again, as the cached profile cannot be used: %s", error)
        return None
    return profile


def keep(profile: Profile) -> Path | None:
    """Save a profile in the cache, for this user alone.

    Returns where, or None where that is not possible.
    """
    path = cache_path(profile.key)
    try:
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(path.parent)
        profile.save(path, private=True)
    except OSError as error:
        logger.warning(
            "PAT could not keep the profile in %s (%s) and will measure again at the next start; "
            "set %s to a directory that can be written",
            path,
            error,
            CACHE_DIR,
        )
        return None
    return path
