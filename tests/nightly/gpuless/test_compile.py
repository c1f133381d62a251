"""Compiled engines with other strides, a user's folder, and the C++ compiler."""

from __future__ import annotations

from tests.gpuless.programs import Program
from tests.gpuless.test_compile import COLD, check, results

__all__ = ["results"]

CASES = (
    "plain",
    "cold",
    "other strides",
    "own folder, cold",
    "own folder, warm",
    "C++, cold",
)


def test_weights_of_other_strides_are_compiled_anew(results: Program) -> None:
    """Beside the artifacts of weights in place, which vLLM would run without a look at strides."""
    check(results.of("other strides"), results.of("plain"), COLD)


def test_a_folder_of_the_users(results: Program) -> None:
    before, after = results.of("own folder, cold"), results.of("own folder, warm")
    nothing = dict.fromkeys(("num_compiled_artifacts_saved", "num_cache_entries_updated"), 0)
    compiled = {"num_graphs_seen": 2, "num_aot_compiles": 0, "num_compiled_artifacts_loaded": 0}
    for result, counts in ((before, compiled), (after, nothing)):
        check(result, results.of("plain"), counts)
    for cold, warm in zip(before["compiled"], after["compiled"], strict=True):
        saved = cold["num_compiled_artifacts_saved"]
        assert saved == cold["num_cache_entries_updated"] > 0
        assert warm["num_compiled_artifacts_loaded"] == saved


def test_compiled_to_machine_code(results: Program) -> None:
    check(results.of("C++, cold"), results.of("plain"), COLD)
