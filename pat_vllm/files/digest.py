"""The digest by which damage to a file is seen. It is no signature: who may write may make one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"
"""Name of the field."""


def digest_of(content: Mapping[str, Any]) -> str:
    """Of plain values, whatever their order: SHA-256, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content after its digest."""
    return {DIGEST: digest_of(content), **content}
