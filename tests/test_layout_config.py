"""A layout's own copy of the engine's config, and the state of vLLM's that belongs to its group."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, VllmConfig
from vllm.distributed import parallel_state

from pat_vllm.layout import Layout
from pat_vllm.patches import groups as patches
from pat_vllm.worker.layout_config import layout_config

REPLICAS, PAIRS, GROUP = Layout(1, 4), Layout(2, 2), Layout(4, 1)


def engine_config(**pat: Any) -> VllmConfig:
    config = VllmConfig(additional_config={"pat": pat})
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 4
    config.compilation_config = CompilationConfig(
        cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32], max_cudagraph_capture_size=32
    )
    return config


def test_ranks_of_a_layout_are_told_apart_as_those_of_static_engines() -> None:
    engine = engine_config()
    for layout in (REPLICAS, PAIRS, GROUP):
        seen = set()
        for rank in range(4):
            config = layout_config(engine, layout, rank).parallel_config
            assert (config.tensor_parallel_size, config.world_size) == (layout.tp, layout.tp)
            seen.add((config.data_parallel_index, config.rank))
        assert len(seen) == 4, "two ranks would share a compile cache"
    assert engine.parallel_config.tensor_parallel_size == 4


def test_compiled_code_of_two_layouts_has_two_keys() -> None:
    engine = engine_config()
    keys = {layout_config(engine, one).compute_hash() for one in (REPLICAS, PAIRS, GROUP)}
    assert len(keys) == 3
    wider = engine_config()
    wider.parallel_config.tensor_parallel_size = wider.parallel_config.world_size = 8
    # The same tp, but another group name in the compiled code.
    one, other = (layout_config(e, at) for e, at in ((engine, PAIRS), (wider, Layout(2, 4))))
    assert one.compute_hash() != other.compute_hash()


def test_compiled_code_of_two_layouts_has_two_folders() -> None:
    engine = engine_config()
    assert layout_config(engine, PAIRS).compilation_config.cache_dir == "", "vLLM's, by the key"
    engine.compilation_config.cache_dir = "/a/user's"
    configs = [layout_config(engine, one).compilation_config for one in (REPLICAS, PAIRS, GROUP)]
    assert [config.cache_dir for config in configs] == [
        "/a/user's/tp1dp4",
        "/a/user's/tp2dp2",
        "/a/user's/tp4dp1",
    ]


@pytest.mark.parametrize(
    ("switch_at", "sizes"),
    [({"5": 2, "1": 4}, {2: [1, 2, 4, 8], 4: [1]}), ({"100": 2}, {2: [1, 2, 4, 8, 16, 32]})],
)
def test_graphs_are_captured_for_the_batches_that_a_layout_sees(
    switch_at: dict[str, int], sizes: dict[int, list[int]]
) -> None:
    engine = engine_config(policy={"kind": "schedule", "switch_at": switch_at})
    for tp, expected in sizes.items():
        config = layout_config(engine, Layout.of(tp, 4)).compilation_config
        assert config.cudagraph_capture_sizes == expected
        assert config.max_cudagraph_capture_size == expected[-1]
    base = layout_config(engine, REPLICAS).compilation_config
    assert base.cudagraph_capture_sizes == engine.compilation_config.cudagraph_capture_sizes


def test_every_size_is_captured_where_the_policy_sets_no_limit() -> None:
    engine = engine_config(policy={"kind": "predictor"})
    for layout in (REPLICAS, PAIRS, GROUP):
        config = layout_config(engine, layout).compilation_config
        assert config.cudagraph_capture_sizes == [1, 2, 4, 8, 16, 32]


def test_each_group_has_its_own_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashInfer's all-reduce makes them: for the group that is the first to ask."""
    module = SimpleNamespace(**patches._WORKSPACES)
    monkeypatch.setitem(sys.modules, patches._FLASHINFER, module)  # type: ignore[arg-type]
    monkeypatch.setattr(patches, "_workspaces_of", {})
    groups: list[Any] = [SimpleNamespace(name=name) for name in "abc"]
    monkeypatch.setattr(parallel_state, "_TP", groups[0])
    monkeypatch.setattr(parallel_state, "_ETP", groups[0])
    for group in [*groups, *groups, groups[1]]:
        patches.install_tp_group(group)
        if module._fi_ar_workspace is None:
            module._fi_ar_workspace = group.name
        assert module._fi_ar_workspace == group.name


def test_experts_lie_over_the_active_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """And vLLM destroys the group that it made for them."""
    monkeypatch.setattr(patches, "_expert_groups_of_vllm", {})
    own, *groups = (SimpleNamespace(name=name) for name in "abc")
    for name in ("_TP", "_ETP", "_EP"):
        monkeypatch.setattr(parallel_state, name, own)
    for group in groups:
        patches.install_tp_group(group)  # type: ignore[arg-type]
        assert parallel_state._EP is parallel_state._TP is group
    for _ in range(2):
        patches.give_expert_group_back()
        assert parallel_state._EP is own

    monkeypatch.setattr(parallel_state, "_EP", None)  # of a dense model
    patches.install_tp_group(groups[0])  # type: ignore[arg-type]
    assert parallel_state._EP is None
