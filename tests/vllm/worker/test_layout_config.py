"""A layout's own copy of the engine's config, and the state of vLLM's that belongs to its group."""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, VllmConfig
from vllm.distributed import parallel_state

from pat_vllm.layout import Layout
from pat_vllm.patches import groups as patches
from pat_vllm.worker.layout_config import layout_config

REPLICAS, PAIRS, GROUP = Layout(1, 4), Layout(2, 2), Layout(4, 1)
EVERY_SIZE = [1, 2, 4, 8, 16, 32]


def engine_config(**pat: Any) -> VllmConfig:
    config = VllmConfig(additional_config={"pat": pat})
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 4
    config.compilation_config = CompilationConfig(
        cudagraph_capture_sizes=EVERY_SIZE, max_cudagraph_capture_size=32
    )
    return config


def test_ranks_of_a_layout_are_told_apart_as_those_of_static_engines() -> None:
    engine = engine_config()
    for layout in (REPLICAS, PAIRS, GROUP):
        configs = [layout_config(engine, layout, rank).parallel_config for rank in range(4)]
        for config in configs:
            assert (config.tensor_parallel_size, config.world_size) == (layout.tp, layout.tp)
        ranks = {(config.data_parallel_index, config.rank) for config in configs}
        assert ranks == {*product(range(layout.replicas), range(layout.tp))}, "of compile caches"
    assert engine.parallel_config.tensor_parallel_size == 4


def test_compiled_code_of_two_layouts_has_two_keys_and_folders() -> None:
    engine, wider = engine_config(), engine_config()
    keys = {layout_config(engine, layout).compute_hash() for layout in (REPLICAS, PAIRS, GROUP)}
    wider.parallel_config.tensor_parallel_size = wider.parallel_config.world_size = 8
    # The same tp, but another group name in the compiled code.
    keys.add(layout_config(wider, Layout(2, 4)).compute_hash())
    assert len(keys) == 4
    assert layout_config(engine, PAIRS).compilation_config.cache_dir == "", "vLLM's, by the key"
    engine.compilation_config.cache_dir = "/a/user's"
    configs = [layout_config(engine, one).compilation_config for one in (REPLICAS, PAIRS, GROUP)]
    names = [config.cache_dir.removeprefix("/a/user's/") for config in configs]
    assert names == ["tp1dp4", "tp2dp2", "tp4dp1"]


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ({"kind": "schedule", "switch_at": {"5": 2, "1": 4}}, {2: [1, 2, 4, 8], 4: [1]}),
        ({"kind": "schedule", "switch_at": {"100": 2}}, {2: EVERY_SIZE}),
        ({"kind": "predictor"}, {2: EVERY_SIZE, 4: EVERY_SIZE}),
    ],
)
def test_graphs_are_captured_for_the_batches_that_a_layout_sees(
    policy: dict[str, Any], sizes: dict[int, list[int]]
) -> None:
    """Every size, where the policy sets no limit."""
    engine = engine_config(policy=policy)
    for tp, expected in ({1: EVERY_SIZE} | sizes).items():
        config = layout_config(engine, Layout.of(tp, 4)).compilation_config
        assert config.cudagraph_capture_sizes == expected
        assert config.max_cudagraph_capture_size == expected[-1]


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
