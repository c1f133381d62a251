"""Where vLLM looks for compiled code: never where that of other layouts, ranks or weights lies.

By the configs that layouts have; engines are in `test_compile.py`, ranges of batch sizes in
`test_platforms.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.compilation.caching import aot_compile_hash_factors
from vllm.config import CompilationConfig, VllmConfig

from pat_vllm.layout import Layout
from pat_vllm.start.setup import Setup
from pat_vllm.worker.layout_config import layout_config


def engine_config(ranks: int = 4, cache_dir: str = "", **pat: Any) -> Any:
    config: Any = VllmConfig(additional_config={"pat": pat})
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    config.compilation_config = CompilationConfig(cache_dir=cache_dir)
    return config


def configs_of(engine: Any) -> dict[tuple[Layout, int], Any]:
    """The config of each rank in each layout."""
    return {
        (layout, rank): layout_config(engine, Setup.of(engine), layout, rank)
        for layout in Setup.of(engine).layouts
        for rank in range(engine.parallel_config.world_size)
    }


def place_of(config: Any) -> tuple[int, int]:
    """Of a rank, as vLLM names folders by it."""
    return config.parallel_config.rank, config.parallel_config.data_parallel_index


def artifacts_of(engine: Any) -> dict[tuple[Layout, int], tuple[str, tuple[int, int]]]:
    """What the path of an AOT artifact is made of, beside the source of the model's class."""
    return {
        which: (str(aot_compile_hash_factors(config)), place_of(config))
        for which, config in configs_of(engine).items()
    }


def test_ranks_and_layouts_have_artifacts_of_their_own() -> None:
    """And find them at a second start."""
    cases: list[tuple[int, dict[str, Any]]]
    cases = [(2, {}), (8, {}), (8, {"layouts": [2, 8], "base_tp": 2})]
    for ranks, pat in cases:
        artifacts = artifacts_of(engine_config(ranks, **pat))
        assert len(set(artifacts.values())) == len(artifacts)
        assert artifacts_of(engine_config(ranks, **pat)) == artifacts


def test_folders_of_a_user() -> None:
    for own in ("a/user's", "other"):
        engine = engine_config(cache_dir=own)
        engine.compilation_config.debug_dump_path = Path("/dump")
        configs = configs_of(engine).values()
        folders = [config.compilation_config.cache_dir for config in configs]
        # vLLM has a folder for each rank of a group in it, and no more.
        assert len(set(zip(folders, map(place_of, configs), strict=True))) == len(configs)
        assert {os.path.commonpath([own, folder]) for folder in folders} == {own}
        dumps = [config.compile_debug_dump_path() for config in configs]
        assert len(set(dumps)) == len(dumps)
        assert all(folder.is_relative_to("/dump") for folder in dumps)
    for config in configs_of(engine_config()).values():
        assert config.compilation_config.cache_dir == "", "vLLM names it by the key"
        assert config.compile_debug_dump_path() is None


def test_other_weights_have_other_artifacts() -> None:
    """tp=2 of each of these has other strides, or another name of its group in the code."""
    engines = [
        engine_config(2, weights="inplace"),
        engine_config(2, weights="materialized"),
        engine_config(2, base_tp=2),
        engine_config(4),
        engine_config(4, layouts=[2, 4], base_tp=2),
        engine_config(8),
    ]
    keys = [
        {key for (layout, _), (key, _) in artifacts_of(engine).items() if layout.tp == 2}
        for engine in engines
    ]
    assert [len(of_engine) for of_engine in keys] == [1] * len(engines)
    assert len(set.union(*keys)) == len(engines)


def test_what_changes_no_code_changes_no_key() -> None:
    """Policies, what is carried at a switch, and what was said of the choice; and in every rank."""
    same = [
        engine_config(layouts=[1, 4], base_tp=1),
        engine_config(layouts=[1, 4], base_tp=1, kv_transfer="recompute"),
        engine_config(layouts=[1, 4], base_tp=1, policy={"kind": "static", "tp": 4}),
        engine_config(layouts=[1, 4], state_dir="state"),
        engine_config(layouts=[1, 4], launcher="mp"),
    ]
    same[1].additional_config["pat_chosen"] = {"found": "these"}
    hashes = [[config.compute_hash() for config in configs_of(engine).values()] for engine in same]
    assert all(of_engine == hashes[0] for of_engine in hashes)
    assert len(set(hashes[0])) == 2, "one for each layout"
    others = [
        engine_config(layouts=[1, 2, 4]),
        engine_config(layouts=[1, 4], weights="inplace"),
        engine_config(layouts=[1, 4]),
    ]
    others[-1].additional_config["another_plugin"] = 1
    for other in others:
        assert not {*hashes[0]} & {config.compute_hash() for config in configs_of(other).values()}


def test_what_compiling_writes_down_stays_in_the_layout() -> None:
    """vLLM keeps folders, files, times and layers of the compiled model in its config."""
    engine = engine_config()
    first, *others = configs_of(engine).values()
    before = [repr(vars(other.compilation_config)) for other in (engine, *others)]
    compilation = first.compilation_config
    compilation.cache_dir = "/where/one/is"
    compilation.traced_files.add("model.py")
    compilation.static_forward_context["layer"] = object()
    compilation.inductor_compile_config["pass"] = object()
    compilation.pass_config.eliminate_noops = not compilation.pass_config.eliminate_noops
    assert [repr(vars(other.compilation_config)) for other in (engine, *others)] == before
