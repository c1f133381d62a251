"""What the drafter that looks into earlier responses must draft, computed in the plainest way."""

from __future__ import annotations

from collections.abc import Sequence

from pat_vllm.drafts.corpus import LONGEST


def suffix_draft(
    own: Sequence[int], rows: Sequence[Sequence[int]], shortest: int, k: int
) -> tuple[list[int], int]:
    """What followed the longest suffix of a text, the latest of equals, the own text after `rows`.

    Returns:
        At most `k` tokens, and the length of the match; no tokens and 0 where it is too short.
    """
    match, end, text = 0, 0, own
    for row in [*rows, own]:
        for place in range(1, len(row)):
            length = 0
            while (
                length < min(place, len(own), LONGEST) and row[place - 1 - length] == own[~length]
            ):
                length += 1
            if length and length >= match:
                match, end, text = length, place, row
    if match < shortest:
        return [], 0
    tokens = list(text[end : end + k])
    while text is own and match >= len(own) - end and len(tokens) < k:
        tokens.append([*own, *tokens][end + len(tokens)])  # the end repeats itself
    return tokens, match
