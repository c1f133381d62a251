"""Prompts with images for trainers' own calls, and what stock vLLM answers."""

from __future__ import annotations

from tests.support.engines import Job, Outcome
from tests.support.stock import stock_answers
from tests.support.vision import PLACE

OLD, NEW = "qwen2_5_vl", "qwen2_5_vl_updated"
SAMPLING = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}


def jobs() -> dict[str, Job]:
    """Two that differ by an image alone, two images, text; of other lengths."""
    one = [5, 6, 7, *PLACE["image"], 8, 9]
    two = [*PLACE["image"], 11, 12, *PLACE["image"], 13]
    media = {
        "one": (one, [(1, 168, 112)]),
        "another": (one, [(2, 168, 112)]),
        "two": (two, [(3, 112, 56), (4, 56, 84)]),
        "text": ([20, 21, 22, 23], []),
    }
    return {
        name: Job(
            prompt,
            SAMPLING | {"max_tokens": 12 + 24 * index},
            media=tuple(("image", *image) for image in images),
        )
        for index, (name, (prompt, images)) in enumerate(media.items())
    }


def expected(model: str) -> dict[str, Outcome]:
    """What stock vLLM generates."""
    return stock_answers(model, jobs(), language_model_only=False)
