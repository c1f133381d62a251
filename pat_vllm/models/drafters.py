"""What makes draft tokens: text, or a model with weights of its own. Pure.

All that depends on vLLM's `speculative_config.method` asks here. A drafter of text proposes what
followed the last tokens elsewhere. One with weights has a model and a layer or more of KV: layouts
share the weights as they share the target's, a switch carries the KV with the target's, and its
pass runs in every step, at draft length 0, too. A gap in its KV could not be filled later: what it
computed there depends on the target's hidden states of that step.
"""

from __future__ import annotations

from typing import Any

OF_TEXT = ("ngram", "ngram_gpu")
"""vLLM's methods of drafters that have neither weights nor KV."""
OF_WEIGHTS = ("mtp", "eagle3", "eagle", "draft_model")
"""vLLM's methods of drafters with weights that PAT serves, from vLLM 0.32 on."""
METHODS = (*OF_TEXT, *OF_WEIGHTS)


def has_weights(speculative: Any) -> bool:
    """Whether an engine drafts with a model.

    Args:
        speculative: vLLM's `SpeculativeConfig`; None: there are no drafts.
    """
    return speculative is not None and speculative.method in OF_WEIGHTS


def is_mtp(given: Any) -> bool:
    """Whether the method that a user gives is MTP: vLLM takes `mimo_mtp` and the like for `mtp`."""
    return isinstance(given, str) and (given == "mtp" or given.endswith("_mtp"))


def instead_of(given: Any) -> str | None:
    """What is allowed in place of a method that a user gives; None: that itself, as far as is known
    before vLLM reads it. Without one, vLLM looks at the drafter's model."""
    if given is None or ("mtp" if is_mtp(given) else given) in METHODS:
        return None
    return f"allowed {', '.join(METHODS)}"


def looks_into_responses(method: str, use_v2: bool) -> bool:
    """Whether drafts come from earlier responses, too.

    With "ngram_gpu" on Model Runner V1 vLLM's own drafter runs, which looks at the request alone.
    Beside a drafter with weights, text drafts for the requests of which more was accepted then,
    with V2 only: its kernels look on the device, where V1 has no texts.
    """
    return method in METHODS and (use_v2 or method == "ngram")


def reads_ahead(speculative: Any) -> bool:
    """Whether what a drafter keeps for a token depends on the next one, too.

    So the last block of a hit in the prefix cache may be another request's, and vLLM drops it.
    """
    return has_weights(speculative) and bool(speculative.use_eagle_block_drop())


def is_measured(method: str, use_v2: bool) -> bool:
    """Whether steps can be measured with a given number of drafts, and drafts be planned by that.

    With "ngram_gpu" on Model Runner V1 they cannot: that runner drops, before a step, drafts that
    it did not find itself.
    """
    return method in METHODS and (use_v2 or method != "ngram_gpu")
