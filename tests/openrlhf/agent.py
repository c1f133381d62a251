"""The example's agent, whose trajectories take their turns together, and which logs their caches.

All trajectories of a rollout wait for each other before each turn, so that the engine is idle then.
A turn's lengths are skewed. OpenRLHF loads this file by its path.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "integrations" / "openrlhf" / "examples"
TRAJECTORIES = 8
LENGTHS = [24 + 16 * place for place in range(TRAJECTORIES)]
"""Tokens of a response, by its place in the rollout."""
BLOCK = 128
"""Tokens of vLLM's blocks on CPU."""

_spec = importlib.util.spec_from_file_location("calculator", EXAMPLES / "calculator.py")
assert _spec is not None and _spec.loader is not None
_example: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_example)


class _Watched:
    """An engine as a trajectory sees it. What it found in caches, and what it should have."""

    def __init__(self, engine: Any, together: asyncio.Barrier) -> None:
        self._engine = engine
        self._together = together
        self._held = 0
        self.first = 0
        self.later = 0
        self.expected = 0

    async def generate(self, prompt: list[int], params: Any, **rest: Any) -> Any:
        place = await self._together.wait()
        params = copy.copy(params)
        params.max_tokens, params.ignore_eos = LENGTHS[place], True
        params.stop_token_ids = []
        output = await self._engine.generate(prompt, params, **rest)
        if self._held:
            # The KV of a last token is never computed.
            self.expected += (self._held - 1) // BLOCK * BLOCK
            self.later += output.num_cached_tokens
        else:
            self.first = output.num_cached_tokens
        self._held = len(prompt) + len(output.outputs[0].token_ids)
        return output


class AgentExecutor(_example.AgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._together = asyncio.Barrier(TRAJECTORIES)

    async def execute(self, *, llm_engine: Any, **rest: Any) -> Any:
        engine = _Watched(llm_engine, self._together)
        response = await super().execute(llm_engine=engine, **rest)
        cached = {
            "first_cached": float(engine.first),
            "later_cached": float(engine.later),
            "later_expected": float(engine.expected),
        }
        return response | {"extra_logs": response["extra_logs"] | cached}
