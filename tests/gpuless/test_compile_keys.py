"""Where vLLM looks for compiled code: never where that of other layouts, ranks or weights lies.

And for which ranges of batch sizes it compiles. By the configs that layouts have; engines are in
`test_compile.py`. Each check is shown to see mistakes in those configs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.caching import aot_compile_hash_factors
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.compilation import PassConfig

from pat_vllm.config import layouts_of
from pat_vllm.layout import Layout
from pat_vllm.limits import limits_of
from pat_vllm.worker import layout_config as module
from pat_vllm.worker.layout_config import layout_config
from tests.support.mutation import mutated

MAX_TOKENS, HIDDEN = 8192, 4096
FUSED_MB = {2: 64.0, 4: 2.0, 8: 0.5}
"""Up to which size, in MiB, an all-reduce is fused with the norm after it, by tp; as on H100."""


def engine_config(ranks: int = 4, cache_dir: str = "", **pat: Any) -> Any:
    config: Any = VllmConfig(additional_config={"pat": pat})
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    config.compilation_config = CompilationConfig(cache_dir=cache_dir)
    return config


def configs_of(engine: Any) -> dict[tuple[Layout, int], Any]:
    """The config of each rank in each layout."""
    ranks = engine.parallel_config.world_size
    return {
        (layout, rank): layout_config(engine, layout, rank)
        for layout in layouts_of(engine)
        for rank in range(ranks)
    }


def artifacts_of(engine: Any) -> dict[tuple[Layout, int], tuple[str, int, int]]:
    """What the path of an AOT artifact is made of, beside the source of the model's class."""
    return {
        which: (
            str(aot_compile_hash_factors(config)),
            config.parallel_config.rank,
            config.parallel_config.data_parallel_index,
        )
        for which, config in configs_of(engine).items()
    }


# ---------------------------------------------------------------- checks


def check_ranks_and_layouts_have_artifacts_of_their_own() -> None:
    for engine in (engine_config(2), engine_config(8), engine_config(8, layouts=[2, 8], base_tp=2)):
        artifacts = artifacts_of(engine)
        assert len(set(artifacts.values())) == len(artifacts)


def check_folders_in_the_users_folder() -> None:
    """Below it vLLM has a folder for each rank of a group, and no more."""
    for own in ("a/user's", "other"):
        configs = configs_of(engine_config(4, cache_dir=own)).values()
        folders = [
            (
                config.compilation_config.cache_dir,
                config.parallel_config.rank,
                config.parallel_config.data_parallel_index,
            )
            for config in configs
        ]
        assert len(set(folders)) == len(folders)
        assert {os.path.commonpath([own, folder]) for folder, _, _ in folders} == {own}
    for config in configs_of(engine_config()).values():
        assert config.compilation_config.cache_dir == "", "vLLM names it by the key"


def check_folders_for_debugging() -> None:
    engine = engine_config(4)
    assert {one.compile_debug_dump_path() for one in configs_of(engine).values()} == {None}
    engine.compilation_config.debug_dump_path = Path("/dump")
    folders = [config.compile_debug_dump_path() for config in configs_of(engine).values()]
    assert len(set(folders)) == len(folders)
    assert all(folder.is_relative_to("/dump") for folder in folders)


def check_other_weights_have_other_artifacts() -> None:
    """tp=2 of each of these has other strides, or another name of its group in the code."""
    engines = [
        engine_config(2),
        engine_config(2, weights="materialized"),
        engine_config(2, base_tp=2),
        engine_config(4),
        engine_config(4, layouts=[2, 4], base_tp=2),
        engine_config(8),
    ]
    keys = [
        {key for (layout, _), (key, *_) in artifacts_of(engine).items() if layout.tp == 2}
        for engine in engines
    ]
    assert [len(one) for one in keys] == [1] * len(engines)
    assert len(set.union(*keys)) == len(engines)


def check_a_second_start_finds_them() -> None:
    for pat in ({}, {"weights": "inplace"}, {"base_tp": 2}):
        assert artifacts_of(engine_config(4, **pat)) == artifacts_of(engine_config(4, **pat))


def check_what_compiling_writes_down_stays_in_the_layout() -> None:
    """vLLM keeps folders, files, times and layers of the compiled model in its config."""
    engine = engine_config(4)
    one, *others = configs_of(engine).values()
    before = [repr(vars(other.compilation_config)) for other in (engine, *others)]
    mine = one.compilation_config
    mine.cache_dir = mine.local_cache_dir = "/where/one/is"
    mine.traced_files.add("model.py")
    mine.static_forward_context["layer"] = object()
    mine.inductor_compile_config["pass"] = object()
    mine.pass_config.eliminate_noops = not mine.pass_config.eliminate_noops
    mine.compilation_time += 1
    assert [repr(vars(other.compilation_config)) for other in (engine, *others)] == before


def check_ranges_are_those_of_stock_vllm() -> None:
    """Also with ends of ranges that the user has given, of which one is vLLM's at another tp."""
    for given in ([], [100, 1000], [256, 4096]):
        engine = fusing(engine_config(8, base_tp=1), given)
        made = list(engine.compilation_config.compile_ranges_endpoints)
        for layout in layouts_of(engine):
            tokens = limits_of(engine, layout).max_num_batched_tokens
            stock = fusing(engine_config(layout.tp), given, tokens)
            found = layout_config(engine, layout).compilation_config
            assert found.get_compile_ranges() == stock.compilation_config.get_compile_ranges()
            assert found.pass_config.fuse_allreduce_rms == (layout.tp > 1)
        assert engine.compilation_config.compile_ranges_endpoints == made


def fusing(engine: Any, given: Sequence[int], tokens: int = MAX_TOKENS) -> Any:
    """A config with which vLLM fuses all-reduces, where there are any."""
    engine.model_config = SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: HIDDEN)
    engine.scheduler_config.max_num_batched_tokens = tokens
    engine.compilation_config = CompilationConfig(compile_ranges_endpoints=list(given))
    tp = engine.parallel_config.tensor_parallel_size
    engine.compilation_config.pass_config.fuse_allreduce_rms = tp > 1
    engine._set_compile_ranges()
    return engine


@pytest.fixture(autouse=True)
def sizes_of_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = staticmethod(lambda: FUSED_MB)
    monkeypatch.setattr(PassConfig, "default_fi_allreduce_fusion_max_size_mb", sizes)


CHECKS = [
    check_ranks_and_layouts_have_artifacts_of_their_own,
    check_folders_in_the_users_folder,
    check_folders_for_debugging,
    check_other_weights_have_other_artifacts,
    check_a_second_start_finds_them,
    check_what_compiling_writes_down_stays_in_the_layout,
    check_ranges_are_those_of_stock_vllm,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test(check: Callable[[], None]) -> None:
    check()


def test_ranges_differ_by_tp() -> None:
    """Or their check could not fail."""
    ranges = {
        tp: fusing(engine_config(tp), []).compilation_config.compile_ranges_endpoints
        for tp in (1, 2, 4, 8)
    }
    assert ranges == {1: [8192], 2: [8192], 4: [256, 8192], 8: [64, 8192]}


RESIZE = module._resize_compile_ranges
MISTAKES: dict[str, tuple[Callable[[], None], Any, Mapping[str, str]]] = {
    "a folder of the user's for all layouts": (
        check_folders_in_the_users_folder,
        layout_config,
        {"config.compilation_config.cache_dir:": "config.compilation_config.cache_dir and False:"},
    ),
    "the user's folder is left": (
        check_folders_in_the_users_folder,
        layout_config,
        {"os.path.join(config.compilation_config.cache_dir, str(layout))": "str(layout)"},
    ),
    "a folder for what all layouts dump": (
        check_folders_for_debugging,
        layout_config,
        {".debug_dump_path /= str(layout)": ".debug_dump_path /= ''"},
    ),
    "replicas share": (
        check_ranks_and_layouts_have_artifacts_of_their_own,
        layout_config,
        {"layout.replica_of(rank)": "0"},
    ),
    "ranks of a group share": (
        check_ranks_and_layouts_have_artifacts_of_their_own,
        layout_config,
        {"layout.tp_rank_of(rank)": "0"},
    ),
    "the layout is left out of the key": (
        check_other_weights_have_other_artifacts,
        layout_config,
        {', "pat_layout": str(layout)}': "}"},
    ),
    "only the tp is in the key": (
        check_other_weights_have_other_artifacts,
        layout_config,
        {'"pat_layout": str(layout)': '"pat_layout": layout.tp'},
    ),
    "weights are left out of the key": (
        check_other_weights_have_other_artifacts,
        layout_config,
        {"{**vllm_config.additional_config, ": "{"},
    ),
    "a key of this start": (
        check_a_second_start_finds_them,
        layout_config,
        {'"pat_layout": str(layout)': '"pat_layout": str(id(config))'},
    ),
    "the compiler's config is shared": (
        check_what_compiling_writes_down_stays_in_the_layout,
        layout_config,
        {"copy.deepcopy(vllm_config.compilation_config)": "vllm_config.compilation_config"},
    ),
    "parts of the compiler's config are shared": (
        check_what_compiling_writes_down_stays_in_the_layout,
        layout_config,
        {"copy.deepcopy(vllm": "copy.copy(vllm"},
    ),
    "the engine's ranges": (
        check_ranges_are_those_of_stock_vllm,
        layout_config,
        {"_resize_compile_ranges(config, vllm_config)": "pass"},
    ),
    "the engine's ends of ranges stay": (
        check_ranges_are_those_of_stock_vllm,
        RESIZE,
        {"set(ranges) - set(added)": "set(ranges)"},
    ),
    "the user's ends of ranges are lost": (
        check_ranges_are_those_of_stock_vllm,
        RESIZE,
        {"set(ranges) - set(added)": "set()"},
    ),
    "replicas fuse all-reduces": (
        check_ranges_are_those_of_stock_vllm,
        RESIZE,
        {"fuse_allreduce_rms = False": "fuse_allreduce_rms = True"},
    ),
    "the engine's ranges are changed": (
        check_ranges_are_those_of_stock_vllm,
        RESIZE,
        {"copy.copy(engine.compilation_config)": "engine.compilation_config"},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    check, function, changes = MISTAKES[mistake]
    check()
    with mutated(function, dict(changes)), pytest.raises(AssertionError):
        check()
