"""Who starts an engine's workers, and on which bundles of a placement group they run."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.config import PATConfig
from pat_vllm.executor.bundles import choose_bundles

# ---------------------------------------------------------------- bundles

TWO_NODES = {0: "b", 1: "a", 2: "b", 3: "a", 4: "c"}


def test_bundles_are_of_one_node_preferably_the_engine_s() -> None:
    assert choose_bundles(TWO_NODES, 2) == [0, 2]
    assert choose_bundles(TWO_NODES, 2, engine_node="a") == [1, 3]
    assert choose_bundles(TWO_NODES, 2, engine_node="c") == [0, 2]
    assert choose_bundles(TWO_NODES, 1, engine_node="c") == [4]
    assert choose_bundles({3: "a", 1: "a", 2: "a"}, 2) == [1, 2]


def test_wanted_bundles_keep_their_order() -> None:
    assert choose_bundles(TWO_NODES, 2, [2, 0]) == [2, 0]
    assert choose_bundles(TWO_NODES, 2, [3, 1], engine_node="b") == [3, 1]


@pytest.mark.parametrize(
    ("ranks", "wanted", "message"),
    [
        (6, None, r"tensor_parallel_size=6, but the placement group has 5 bundles.*larger"),
        (3, None, r"at most 2 bundles on one node \(node b: \[0, 2\]; .*one engine per node"),
        (2, [0, 1], r"VLLM_RAY_BUNDLE_INDICES=0,1 .*several nodes \(node b: \[0\]; node a: \[1\]"),
        (2, [0, 1], r"use one engine per node, with tensor_parallel_size at most"),
        (2, [0], r"VLLM_RAY_BUNDLE_INDICES=0 must name 2 different bundles"),
        (2, [0, 0], r"VLLM_RAY_BUNDLE_INDICES=0,0 must name 2 different bundles"),
        (2, [0, 7], r"VLLM_RAY_BUNDLE_INDICES=0,7 names \[7\]; .*\[0, 1, 2, 3, 4\]"),
    ],
)
def test_other_bundles_are_refused(ranks: int, wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_bundles(TWO_NODES, ranks, wanted)


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


# ---------------------------------------------------------------- the option


def test_the_option() -> None:
    assert PATConfig.parse(None).launcher == "auto"
    assert PATConfig.parse({"launcher": "ray"}).launcher == "ray"
    with pytest.raises(ValueError, match=r"'launcher' has value 'slurm'.*'auto', 'mp' or 'ray'"):
        PATConfig.parse({"launcher": "slurm"})


def config_with(launcher: str, **parallel: Any) -> Any:
    return SimpleNamespace(
        additional_config={"pat": {"launcher": launcher}},
        parallel_config=SimpleNamespace(**{"placement_group": None, **parallel}),
    )


def test_processes_where_there_is_no_placement_group() -> None:
    import pat_vllm
    from pat_vllm.executor.launcher import executor_class

    for launcher in ("auto", "mp"):
        assert executor_class(config_with(launcher)) is pat_vllm.PATExecutor


def test_a_platform_without_ray() -> None:
    """vLLM's CPU platform has no name for its devices in Ray."""
    import pat_vllm
    from pat_vllm.executor.launcher import executor_class

    with pytest.raises(ValueError, match=r"launcher='ray' runs on CUDA.*'cpu'.*launcher='mp'"):
        executor_class(config_with("ray"))
    # Nor does a placement group help.
    assert executor_class(config_with("auto", placement_group=object())) is pat_vllm.PATExecutor


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor import ray_utils

    from pat_vllm.executor.launcher import executor_class

    monkeypatch.setattr(ray_utils, "ray", None)
    with pytest.raises(ValueError, match=r"launcher='ray' needs Ray.*pip install ray"):
        executor_class(config_with("ray"))


IMPORT = """
import sys
sys.modules["ray"] = None
import pat_vllm
pat_vllm.PATRayExecutor
"""


@pytest.mark.slow
def test_the_class_needs_ray() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: PATRayExecutor needs Ray" in done.stderr


def test_a_class_that_says_otherwise() -> None:
    import pat_vllm
    from pat_vllm.executor.launcher import prepare_launch

    prepare_launch(config_with("mp"), pat_vllm.PATExecutor)
    with pytest.raises(ValueError, match=r"launcher='ray', but .*=PATExecutor.*launcher='mp'"):
        prepare_launch(config_with("ray"), pat_vllm.PATExecutor)
