"""On which bundles of a placement group an engine's workers run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.executor.bundles import choose_bundles

TWO_NODES = {0: "b", 1: "a", 2: "b", 3: "a", 4: "c"}


def test_bundles_are_of_one_node_preferably_the_engine_s() -> None:
    assert choose_bundles(TWO_NODES, 2) == [0, 2]
    assert choose_bundles(TWO_NODES, 2, engine_node="a") == [1, 3]
    assert choose_bundles(TWO_NODES, 2, engine_node="c") == [0, 2]
    assert choose_bundles(TWO_NODES, 1, engine_node="c") == [4]
    assert choose_bundles({3: "a", 1: "a", 2: "a"}, 2) == [1, 2]
    assert choose_bundles(TWO_NODES, 2, [3, 1], engine_node="b") == [3, 1], "as they are wanted"


@pytest.mark.parametrize(
    ("ranks", "wanted", "words"),
    [
        (6, None, ["tensor_parallel_size=6", "5 bundles", "larger", "pat.launcher='mp'"]),
        (3, None, ["tensor_parallel_size=3", "at most 2", "node b: [0, 2]", "engine per node"]),
        (2, [0, 1], ["INDICES=0,1", "node b: [0]; node a: [1]", "one engine per node"]),
        (2, [0, 0], ["INDICES=0,0 ", "2 different bundles"]),
        (2, [0, 7], ["INDICES=0,7 ", "[7]", "[0, 1, 2, 3, 4]"]),
    ],
)
def test_other_bundles_are_refused(ranks: int, wanted: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        choose_bundles(TWO_NODES, ranks, wanted)
    assert not [word for word in words if word not in str(error.value)], str(error.value)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
    st.integers(1, 6),
    st.sampled_from("abcd"),
)
def test_one_node_is_found_if_any_has_enough(nodes: list[str], ranks: int, engine: str) -> None:
    by_bundle = dict(enumerate(nodes))
    enough = {node for node in nodes if nodes.count(node) >= ranks}
    if not enough:
        with pytest.raises(ValueError, match=f"tensor_parallel_size={ranks}"):
            choose_bundles(by_bundle, ranks, engine_node=engine)
        return
    chosen = choose_bundles(by_bundle, ranks, engine_node=engine)
    assert len(set(chosen)) == len(chosen) == ranks
    (node,) = {by_bundle[bundle] for bundle in chosen}
    assert node in enough
    assert node == engine or engine not in enough
