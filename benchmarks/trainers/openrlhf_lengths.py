"""OpenRLHF agent of `openrlhf_iteration`: every response has a length that is given."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    """A label is a JSON list: the length, in tokens, of each of the prompt's samples."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: Counter[str] = Counter()

    async def execute(self, prompt: str, label: str, sampling_params: Any, **rest: Any) -> Any:
        lengths = json.loads(label)
        params = deepcopy(sampling_params)
        params.max_tokens = lengths[self._sent[prompt] % len(lengths)]
        params.ignore_eos = True
        self._sent[prompt] += 1
        output = await super().execute(prompt, label, params, **rest)
        return output | {"reward": 0.0, "scores": 0.0}
