"""An OpenRLHF agent whose responses to a prompt all have about the same length."""

from __future__ import annotations

import random
import zlib
from copy import deepcopy
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    async def execute(self, prompt: str, label: str, sampling_params: Any, **rest: Any) -> Any:
        params = deepcopy(sampling_params)
        params.max_tokens = 8 + zlib.crc32(prompt.encode()) % 120 + random.randrange(4)
        output = await super().execute(prompt, label, params, **rest)
        reward = float(len(set(output["observation_tokens"])) % 7)
        return output | {"reward": reward, "scores": reward}
