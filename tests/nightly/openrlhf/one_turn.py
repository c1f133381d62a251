"""OpenRLHF's executor of single turns, for a model of noise that takes images.

OpenRLHF lets a policy say what stands for an image, and its training then looks for the image. It
loads this file by its path.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor

_REWARD = Path(__file__).parents[3] / "integrations" / "openrlhf" / "examples" / "reward.py"


class AgentExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__([str(_REWARD)])

    async def execute(self, *, sampling_params: Any, hf_tokenizer: Any, **rest: Any) -> Any:
        params = copy.copy(sampling_params)
        placeholders = hf_tokenizer.image_token_id, hf_tokenizer.video_token_id
        params.logit_bias = dict.fromkeys(placeholders, -100.0)
        return await super().execute(sampling_params=params, hf_tokenizer=hf_tokenizer, **rest)
