"""Compiled engines with other strides, one layout, a user's folder, and the C++ compiler."""

from __future__ import annotations

import pytest

from tests.gpuless.programs import Program
from tests.gpuless.test_compile import check, cold, folders_of, results, warm

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
    check(results.of(case), results.of("plain"), cold(layouts))
    assert set(folders_of(results.of("cold"))).isdisjoint(folders_of(results.of(case)))


def test_a_folder_of_the_users(results: Program) -> None:
    before, after = results.of("own folder, cold"), results.of("own folder, warm")
    nothing = dict.fromkeys(("num_compiled_artifacts_saved", "num_cache_entries_updated"), 0)
    compiled = {"num_graphs_seen": 2, "num_aot_compiles": 0, "num_compiled_artifacts_loaded": 0}
    for result, counts in ((before, compiled), (after, nothing)):
        check(result, results.of("plain"), counts)
        assert all("/own/tp" in folder for folder in folders_of(result))
    for one, other in zip(before["workers"], after["workers"], strict=True):
        saved = one["counter"]["num_compiled_artifacts_saved"]
        assert saved == one["counter"]["num_cache_entries_updated"] > 0
        assert other["counter"]["num_compiled_artifacts_loaded"] == saved


def test_compiled_to_machine_code(results: Program) -> None:
    for case, counts in (("C++, cold", cold()), ("C++, warm", warm())):
        check(results.of(case), results.of("plain"), counts, boundaries=())
