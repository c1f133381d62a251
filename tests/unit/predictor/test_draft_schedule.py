"""Which draft lengths an engine keeps ready."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.predictor.draft_schedule import draft_lengths


@settings(max_examples=60)
@given(
    st.integers(1, 128),
    st.none() | st.lists(st.tuples(st.just(1), st.just(9), st.integers(0, 200)), max_size=3),
)
def test_lengths_that_are_kept_ready(longest: int, schedule: Any) -> None:
    lengths = draft_lengths(longest, schedule)
    assert list(lengths) == sorted(set(lengths))
    assert lengths[0] == 0 and lengths[-1] == longest
    named = {min(longest, length) for _, _, length in schedule or ()}
    assert named <= set(lengths)
    assert all(length & (length - 1) == 0 for length in set(lengths) - named - {longest})
    # From any one the next is at most twice as long.
    assert all(b <= max(1, 2 * a) for a, b in itertools.pairwise(lengths))
