"""Writes prompts of many lengths.

A random model hardly ever ends a response by itself, so the room that a prompt leaves is the length
of its responses: most leave little, a few leave much.
"""

import json
import random
import sys
from pathlib import Path

BATCHES, PROMPTS = 4, 8
"""Training steps, and prompts in each."""

LONGEST = 96
"""Words."""

WORDS = ("the", "of", "and", "to", "in", "is", "it", "what", "how", "many", "sum", "count", "sky")


def prompts(rng: random.Random) -> list[dict[str, str]]:
    """Texts with labels. No two are equally long, which the order in a batch does not change."""
    lengths = rng.sample(range(LONGEST // 2, LONGEST), BATCHES * (PROMPTS - 2))
    lengths += rng.sample(range(4, LONGEST // 2), BATCHES * 2)
    return [
        {"input": " ".join(rng.choices(WORDS, k=length)), "label": str(number)}
        for number, length in enumerate(lengths)
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in prompts(random.Random(0)))
    )
