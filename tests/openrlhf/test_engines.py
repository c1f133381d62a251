"""The rollout actor without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="make test-openrlhf")


@pytest.mark.parametrize("alive", [True, False])
def test_only_a_dead_engine_fails_for_lack_of_a_report(alive: bool) -> None:
    from pat_openrlhf.engines import PatRolloutActor
    from vllm.v1.engine.exceptions import EngineDeadError

    class Engine:
        async def collective_rpc(self, method: str, args: tuple[float]) -> Any:
            raise EngineDeadError()

        async def check_health(self) -> None:
            if not alive:
                raise EngineDeadError()

    class Executor:
        async def execute(self, **arguments: Any) -> str:
            return "a response"

    actor: Any = object.__new__(PatRolloutActor)
    actor.llm, actor.executor = Engine(), Executor()
    actor._running = actor._rollouts = 0
    rollout = actor.generate_responses("a prompt", "a label", None, 8, None, num_samples=2)
    if alive:
        assert asyncio.run(rollout) == ["a response"] * 2
    else:
        with pytest.raises(RuntimeError, match="the PAT engine died during a rollout"):
            asyncio.run(rollout)
