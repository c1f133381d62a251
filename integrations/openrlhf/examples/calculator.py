"""An agent with a calculator, for `reinforce.sh --train.agent_func_path`.

Each response may put a question like "12 * 3", whose answer follows it in the context. A random
model puts none, so that its responses' lengths are multiplied in place of that.
"""

from __future__ import annotations

import copy
import operator
import re
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TURNS = 3
ENDS = range(480, 512)
"""Tokens that end a turn of the random model. GPU: the ids of your model's end of a turn."""

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_QUESTION = re.compile(r"(\d{1,9}) *([-+*]) *(\d{1,9})")


def calculate(text: str) -> int:
    """The answer to the last question in a text."""
    questions = _QUESTION.findall(text)
    left, sign, right = questions[-1] if questions else (len(text), "*", len(text))
    return int(_OPERATORS[sign](int(left), int(right)))


class AgentInstance(AgentInstanceBase):
    """The environment of a trajectory."""

    def __init__(self) -> None:
        self._turns = 0

    async def step(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        """What follows a response. A toy reward: how many different characters it has, modulo 7."""
        self._turns += 1
        text = states["action_text"]
        reward = torch.tensor(float(len(set(text)) % 7))
        done = self._turns == TURNS
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else f"\nanswer: {calculate(text)}\n",
            "done": done,
            "extra_logs": {"turns": float(self._turns)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """What OpenRLHF loads."""

    def __init__(self) -> None:
        super().__init__(AgentInstance)

    async def execute(self, *, sampling_params: Any, **rest: Any) -> Any:
        """As OpenRLHF's, a turn ending before the context is full."""
        params = copy.deepcopy(sampling_params)
        params.stop_token_ids = list(ENDS)
        return await super().execute(sampling_params=params, **rest)
