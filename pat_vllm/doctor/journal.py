"""What a process of the doctor's tells of its work, as it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from pat_vllm.doctor.compare import Agreement, together
from pat_vllm.doctor.values import Check

Found = Agreement | str | Mapping[str, Any]
"""What a check appends: how values agree, a few words, or measured values."""


@dataclass
class Journal:
    """What the process does, a line of JSON each."""

    file: TextIO
    failed: bool = field(default=False, init=False)

    def write(self, **line: Any) -> None:
        """Add a line at once."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def beat(self) -> None:
        """Show that it goes on."""
        self.write(beat=1)

    @contextmanager
    def check(self, name: str) -> Iterator[list[Any]]:
        """Inside, what was found is appended. What is wrong, or raised, ends the session."""
        self.write(doing=name)
        found: list[Found] = []
        start = time.monotonic()
        problem = None
        try:
            yield found
        except Exception as error:  # it is told, whatever it was
            problem = f"{type(error).__name__}: {error}"
        words = [one for one in found if isinstance(one, str)]
        values = {k: v for one in found if isinstance(one, Mapping) for k, v in one.items()}
        if agreements := [one for one in found if isinstance(one, Agreement)]:
            # Generated and scored, in one layout or several.
            agreement = together(agreements)
            words.append(str(agreement))
            problem = problem or agreement.problem
        seconds = round(time.monotonic() - start, 2)
        self.write(check=asdict(Check(name, "; ".join(words), problem, seconds, values)))
        if problem is not None:
            raise Ended


class Ended(Exception):
    """A check has failed, and said so."""
