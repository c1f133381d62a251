"""A calculator as the tool of verl's agent loop, for `grpo.sh`.

A random model never calls a tool. So there is a parser here, too, that takes each of its responses
for a call. On GPUs name your model's own format in `multi_turn.format` ("hermes" for Qwen's).
"""

from __future__ import annotations

import json
import operator
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@function_tool
def calculator(left: int, sign: str, right: int) -> str:
    """Compute with two whole numbers.

    Args:
        left: The first number.
        sign: What to do: "+", "-" or "*".
        right: The second number.
    """
    return str(_OPERATORS[sign](left, right))


@ToolParser.register("random_model")
class RandomModelToolParser(ToolParser):
    """Takes every response for a call of the calculator, with numbers made of its tokens."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """The response's text, and the call."""
        left, right = responses_ids[0], responses_ids[-1]
        question = json.dumps({"left": left, "sign": "+-*"[left % 3], "right": right})
        call = FunctionCall(name="calculator", arguments=question)
        return self.tokenizer.decode(responses_ids), [call]
