"""Profiles that engines took at their start, kept for the next start. Pure but for the files."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat_vllm.files.writing import make_private
from pat_vllm.profile import Profile, ProfileError

logger = logging.getLogger(__name__)

CACHE_DIR = "PAT_CACHE_DIR"
"""Environment variable that names another directory than the user's cache directory."""


def cache_dir() -> Path:
    """Where PAT may keep what it can make again.

    Raises:
        OSError: there is no such place: the user has no home directory.
    """
    given, base = os.environ.get(CACHE_DIR), os.environ.get("XDG_CACHE_HOME")
    try:
        if given:
            return Path(given).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "pat-vllm"
    except RuntimeError as error:
        where = f"{CACHE_DIR}={given}" if given else "~/.cache"
        raise FileNotFoundError(errno.ENOENT, str(error), where) from error


def cache_path(key: Mapping[str, Any]) -> Path:
    """The file of the profile for a key; raises as `cache_dir`."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "profiles" / f"{digest}.json"


def find(key: Mapping[str, Any]) -> Profile | None:
    """The cached profile for a key. One that is damaged or another user's is reported: None."""
    try:
        path = cache_path(key)
        if not os.path.exists(path):
            return None
        profile = Profile.load(path, own=True)
        profile.check(key, path)
    except (ProfileError, OSError) as error:
        logger.warning("PAT measures again, as the cached profile cannot be used: %s", error)
        return None
    return profile


def keep(profile: Profile) -> Path | None:
    """Save a profile in the cache, for this user alone. Returns where, or None if it cannot."""
    try:
        path = cache_path(profile.key)
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(path.parent)
        profile.save(path, private=True)
    except OSError as error:
        logger.warning(
            "PAT could not keep the profile (%s) and will measure again at the next start; set %s "
            "to a directory of yours that can be written",
            error,
            CACHE_DIR,
        )
        return None
    return path
