"""The batches that are planned: sampled from earlier rollouts, or made up. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pat_vllm.advice.lengths import EarlierRollouts, Tokenize, read_rollouts
from pat_vllm.advice.replayed_drafts import DraftsGive, drafts_give
from pat_vllm.files.reading import cut, read_text, shown
from pat_vllm.modelled.shapes import SHAPES, drawn_lengths
from pat_vllm.models.checkpoint import config_file
from pat_vllm.predictor.whole_batch import Batch, acceptance_of_each

if TYPE_CHECKING:
    from pat_vllm.cli.advise import AdviseOptions

FUTURES = 8
"""Sampled batches."""
_SHORTEST_PROMPT, _LONGEST_PROMPT = 64, 512
"""Of made-up prompts, in tokens."""
_USUAL_MAX_TOKENS = 16384


def earlier_rollouts(options: AdviseOptions) -> EarlierRollouts | None:
    """What --lengths holds.

    Raises:
        ValueError: it cannot be read.
    """
    return read_rollouts(options.lengths, _tokenizer(options)) if options.lengths else None


def replayed_drafts(earlier: EarlierRollouts | None, longest: int) -> DraftsGive | None:
    """What drafts would have given; None: texts are not known."""
    return drafts_give(earlier.texts, longest) if earlier and earlier.texts else None


def sampled_batches(
    options: AdviseOptions,
    earlier: EarlierRollouts | None,
    acceptance: float,
    max_model_len: int | None = None,
) -> tuple[tuple[Batch, ...], int]:
    """Some batches, and the tokens that a prompt and its response may have at most.

    Args:
        acceptance: mean probability that a draft is accepted; 0: there are none.
        max_model_len: of an engine that was measured.

    Raises:
        ValueError: an option is wrong.
    """
    if earlier is None and options.shape not in SHAPES:
        raise ValueError(f"--shape is {shown(options.shape)}; allowed are {', '.join(SHAPES)}")
    most, longest_prompt = _longest(options, earlier, max_model_len)
    count, batches = options.responses, []
    for seed in range(options.seed, options.seed + FUTURES):
        random = np.random.default_rng((seed, 1))
        prompts = random.integers(_SHORTEST_PROMPT, _LONGEST_PROMPT, count, endpoint=True)
        if earlier is None:
            lengths = drawn_lengths(options.shape, count, most, seed)
        else:
            picks = random.integers(len(earlier.lengths), size=count)
            lengths = np.minimum(np.array(earlier.lengths)[picks], most)
            if earlier.num_prompt_tokens:
                prompts = np.array(earlier.num_prompt_tokens)[picks]
        each = acceptance_of_each(acceptance, count, seed) if acceptance else None
        batches.append(Batch(np.minimum(prompts, longest_prompt), lengths, each))
    return tuple(batches), most + longest_prompt


def _longest(
    options: AdviseOptions, earlier: EarlierRollouts | None, max_model_len: int | None
) -> tuple[int, int]:
    """Tokens of the longest response, and of the longest prompt."""
    prompt = max(earlier.num_prompt_tokens, default=0) if earlier else 0
    most = options.max_tokens or (max(earlier.lengths) if earlier else _USUAL_MAX_TOKENS)
    if max_model_len is None:
        return most, prompt or _LONGEST_PROMPT
    if not prompt:  # they are made up
        room = max_model_len - (options.max_tokens or 0)
        prompt = max(1, min(_LONGEST_PROMPT, room if options.max_tokens else room // 4))
    if options.max_tokens is None:
        most = max(1, min(most, max_model_len - prompt))
    if prompt + most > max_model_len:
        raise ValueError(
            f"a prompt and its response may have {prompt + most:,} tokens, but the engine of "
            f"--profile was measured with max_model_len={max_model_len}; name shorter responses "
            "(--max-tokens), or profile an engine with a larger max_model_len"
        )
    return most, prompt


def _tokenizer(options: AdviseOptions) -> Tokenize | None:
    """The checkpoint's tokenizer; None where there is none."""
    config = config_file(options.model) if options.model else None
    file = config.with_name("tokenizer.json") if config else None
    if file is None or not file.is_file():
        return None

    def tokenize(texts: list[str]) -> list[list[int]]:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                f"--lengths {options.lengths} holds text, which takes the package `tokenizers`; "
                "`pip install tokenizers`, or give the lengths in tokens"
            ) from None
        try:
            tokenizer = Tokenizer.from_str(read_text(file, "tokenizer"))
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"tokenizer {file} cannot be read: {cut(str(error))}") from None
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    return tokenize
