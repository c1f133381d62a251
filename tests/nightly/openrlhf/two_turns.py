"""Agents that see another image after their first turn. OpenRLHF loads this file by its path."""

from __future__ import annotations

import copy
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from PIL import Image

_TOKENS = 40


class _Instance(AgentInstanceBase):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._turns = 0

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self._turns += 1
        text, last = states["action_text"], self._turns == 2
        score = float(len(set(text)) % 7)
        feedback = "" if last else "\n<|vision_start|><|image_pad|><|vision_end|> And this?\n"
        size, color = (84, 28 * (2 + len(text) % 2)), (len(text) % 256, 90, 160)
        return {
            "rewards": torch.tensor(score if last else 0.0),
            "scores": torch.tensor(score),
            "environment_feedback": feedback,
            "environment_images": None if last else [Image.new("RGB", size, color)],
            "done": last,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"turns": float(self._turns)},
        }


class _Short:
    """An engine whose answers are short, so that there is room for another turn."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(self, prompt: list[int], params: Any, **rest: Any) -> Any:
        params = copy.copy(params)
        params.max_tokens = min(params.max_tokens, _TOKENS)
        return await self._engine.generate(prompt, params, **rest)


class AgentExecutor(MultiTurnAgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(_Instance)

    async def execute(self, *, llm_engine: Any, **rest: Any) -> Any:
        return await super().execute(llm_engine=_Short(llm_engine), **rest)
