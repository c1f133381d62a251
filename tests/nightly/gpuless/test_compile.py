"""Compiled engines with other strides, one layout, a user's folder, and the C++ compiler."""

from __future__ import annotations

import pytest

from tests.gpuless.programs import Program
from tests.gpuless.test_compile import (
    check_code,
    check_cold,
    check_counts,
    check_folders,
    check_nothing_was_compiled_later,
    check_outputs,
    check_warm,
    layouts_of,
    results,
)

__all__ = ["results"]

CASES = (
    "plain",
    "cold",
    "other strides",
    "one layout",
    "own folder, cold",
    "own folder, warm",
    "C++, cold",
    "C++, warm",
)


@pytest.mark.parametrize("case, layouts", [("other strides", 2), ("one layout", 1)])
def test_weights_of_other_strides_are_compiled_anew(
    results: Program, case: str, layouts: int
) -> None:
    """Beside the artifacts of weights in place, which vLLM would run without a look at strides."""
    result = results.of(case)
    check_cold(result, layouts)
    check_code(result)
    check_outputs(result, results.of("plain"))
    earlier = {one["folder"] for one in layouts_of(results.of("cold"))}
    assert earlier.isdisjoint(one["folder"] for one in layouts_of(result))


def test_a_folder_of_the_users(results: Program) -> None:
    cold, warm = results.of("own folder, cold"), results.of("own folder, warm")
    for result in (cold, warm):
        check_folders(result)
        check_outputs(result, results.of("plain"))
        for layout in layouts_of(result):
            assert "/own/tp" in layout["folder"]
    check_counts(cold, num_graphs_seen=2, num_aot_compiles=0, num_compiled_artifacts_loaded=0)
    for before, after in zip(cold["workers"], warm["workers"], strict=True):
        saved = before["counter"]["num_compiled_artifacts_saved"]
        assert saved == before["counter"]["num_cache_entries_updated"] > 0
        assert after["counter"]["num_compiled_artifacts_loaded"] == saved
    check_counts(warm, num_compiled_artifacts_saved=0, num_cache_entries_updated=0)


def test_compiled_to_machine_code(results: Program) -> None:
    cold, warm = results.of("C++, cold"), results.of("C++, warm")
    check_cold(cold)
    check_warm(warm)
    for result in (cold, warm):
        check_nothing_was_compiled_later(result)
        check_folders(result)
        check_code(result, boundaries=())
        check_outputs(result, results.of("plain"))
