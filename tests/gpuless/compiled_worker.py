"""A worker extension that says what vLLM has compiled. Test support only."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from vllm.compilation.counter import compilation_counter

if os.environ.get("PAT_TEST_PLAIN_WEIGHTS"):
    sys.path.append(str(Path(__file__).parents[1] / "support" / "plain_weights"))
    import plain_weights

    plain_weights.apply()


class Compiled:
    """Methods for `collective_rpc`."""

    def compiled(self) -> dict[str, int]:
        """What vLLM has counted in this process."""
        return dataclasses.asdict(compilation_counter)
