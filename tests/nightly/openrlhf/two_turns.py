"""Agents that are shown another image after their first turn. OpenRLHF loads this file by its path.

For a model of noise: see `one_turn.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from PIL import Image

_TOKENS = 40
"""Of a turn."""


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


class _Watched:
    """An engine that answers in few tokens, none of which stands for an image."""

    def __init__(self, engine: Any, placeholders: tuple[int, int]) -> None:
        self._engine = engine
        self._placeholders = placeholders

    async def generate(self, prompt: list[int], params: Any, **rest: Any) -> Any:
        params = copy.copy(params)
        params.max_tokens = min(params.max_tokens, _TOKENS)
        params.logit_bias = dict.fromkeys(self._placeholders, -100.0)
        return await self._engine.generate(prompt, params, **rest)


class AgentExecutor(MultiTurnAgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(_Instance)

    async def execute(self, *, hf_tokenizer: Any, llm_engine: Any, **rest: Any) -> Any:
        placeholders = hf_tokenizer.image_token_id, hf_tokenizer.video_token_id
        engine = _Watched(llm_engine, placeholders)
        return await super().execute(hf_tokenizer=hf_tokenizer, llm_engine=engine, **rest)
