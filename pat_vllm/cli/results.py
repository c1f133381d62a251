"""Results as JSON and as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def to_json(content: Any) -> str:
    """Readable JSON: lists of plain values take one line."""
    text = json.dumps(content, indent=1, default=vars)
    flat = re.compile(r"\[\s*((?:[^\[\]{}\"]|\"[^\"\\]*\")*?)\s*\]")
    return flat.sub(lambda match: "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]", text) + "\n"
