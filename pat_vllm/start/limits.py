"""How many requests and tokens a replica of each layout runs at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import Link

MOST_SEQS = 1024
"""Requests beyond which a replica's limit does not grow with its ranks.

It is vLLM's own default on large GPUs. What a model runner allocates for each request follows it:
a counter for each token of the vocabulary, token ids up to the longest context, logits.
"""
MOST_BATCHED_TOKENS = 16384
"""Tokens of a step beyond which a replica's limit does not grow with its ranks.

It is vLLM's own default on large GPUs. Activations follow it. Over PCIe a step's tokens do not
grow: all-reduces take the most of it, 134 MB each at 16384 tokens of Qwen3-8B, and such a step
takes seconds, in which nobody decodes. A prompt takes as long in several short ones.
"""


@dataclass(frozen=True)
class Limits:
    """What a replica runs at once: requests, and tokens of a step. The names are vLLM's."""

    max_num_seqs: int
    max_num_batched_tokens: int


def layout_limits(
    layout: Layout,
    given: Limits,
    config: PATConfig,
    tokens_per_seq: int = 1,
    link: Link | None = None,
) -> Limits:
    """The limits of each replica of a layout.

    They grow with the ranks of a replica, so that an engine takes the same number of requests in
    every layout. They do not grow beyond `MOST_SEQS` and `MOST_BATCHED_TOKENS`, nor beyond the most
    requests with which the policy enters the layout, and are never below what the user gave.

    Args:
        given: the engine's own, for a rank or for a replica (`PATConfig.limits_per`).
        tokens_per_seq: tokens in a step of each request that decodes; more than 1 with speculative
            decoding. `MOST_BATCHED_TOKENS` does not keep any request out of a step.
        link: what connects the engine's GPUs; None: not known.
    """
    if config.limits_per == "replica":
        return given
    enters_with = config.largest_batch(layout)
    most_seqs = MOST_SEQS if enters_with is None else min(MOST_SEQS, enters_with)
    seqs = min(layout.tp * given.max_num_seqs, max(given.max_num_seqs, most_seqs))
    most_tokens = 0 if link == "pcie" else MOST_BATCHED_TOKENS
    enough_tokens = max(given.max_num_batched_tokens, most_tokens, seqs * tokens_per_seq)
    return Limits(seqs, min(layout.tp * given.max_num_batched_tokens, enough_tokens))


def narrower_limit(given: int | None, layout: Layout, limit: int, config: PATConfig) -> int | None:
    """A limit that a user may give below one of `Limits`; it grows with the ranks, too.

    Args:
        given: the engine's own; None: there is none.
        limit: the layout's, which the result does not exceed.
    """
    if given is None:
        return None
    return min(given * (layout.tp if config.limits_per == "rank" else 1), limit)
