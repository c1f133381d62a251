"""Models that vLLM compiles as on CUDA, in every layout, with AOT artifacts: cold and warm starts.

The engines run on CPU in a process of their own (`compiled.py`), which answers what each has
compiled and generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpuless.programs import Program, running

TOLERANCE = 2e-4
"""Most by which log-probabilities of compiled and other code differ, in float32 on CPU."""
SILENCE = 600.0
"""Seconds without output after which the program hangs. A C++ compiler is silent for long."""
CASES = (
    *("plain", "cold", "warm", "other strides"),
    *("own folder, cold", "own folder, warm", "C++, cold"),
)
"""Of `compiled.py`, in this order: each finds what those before it have kept."""

COLD = {
    **dict.fromkeys(("num_graphs_seen", "num_aot_compiles", "num_aot_artifacts_saved"), 2),
    "num_aot_artifacts_loaded": 0,
}
"""Counts where both layouts were compiled, and artifacts saved."""
WARM = {
    **dict.fromkeys((*COLD, "num_backend_compilations", "num_inductor_compiles"), 0),
    "num_aot_artifacts_loaded": 2,
}
"""Counts where the layouts' artifacts were loaded, and nothing compiled."""

Result = dict[str, Any]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Program]:
    """The program, which goes through `CASES`. A test waits for those that it needs."""
    with running(
        "compiled",
        tmp_path_factory.mktemp("compiled"),
        *CASES,
        support="compiled_on_cpu",
        silence=SILENCE,
        without=("TORCHDYNAMO_DISABLE",),
        VLLM_LOGGING_LEVEL="INFO",
    ) as program:
        yield program


def check(result: Result, plain: Result, counts: dict[str, int]) -> None:
    """Each worker's counters are these after the start, and the same after it has generated and
    switched. The engine's outputs are those of one that compiles nothing."""
    assert "failed" not in result, result["failed"]
    for counter in result["compiled"]:
        assert {name: counter[name] for name in counts} == counts, counter
    assert result["compiled after"] == result["compiled"], "by generating or by switching"
    check_outputs(result, plain)


def check_outputs(result: Result, plain: Result) -> None:
    """They are those of an engine that compiles nothing. A run with switches is compared with that
    engine's runs in each layout: same tokens, and log-probabilities of one or the other."""
    assert plain["runs"].keys() == {"tp=1", "tp=2", "there and back"}
    for run, outcomes in result["runs"].items():
        names = ["tp=1", "tp=2"] if run == "there and back" else [run]
        references = [plain["runs"][name] for name in names]
        assert outcomes.keys() == references[0].keys()
        for name, outcome in outcomes.items():
            for reference in references:
                assert outcome["token_ids"] == reference[name]["token_ids"], (run, name)
            logprobs = zip(
                outcome["logprobs"],
                *(reference[name]["logprobs"] for reference in references),
                strict=True,
            )
            apart = [min(abs(own - other) for other in others) for own, *others in logprobs]
            # No request generates fewer than 12 tokens.
            assert len(apart) >= 12 and max(apart) <= TOLERANCE, (run, name, apart)


@pytest.mark.parametrize("case, counts", [("cold", COLD), ("warm", WARM)])
def test_each_layout_runs_its_own_code(results: Program, case: str, counts: dict[str, int]) -> None:
    result, plain = results.of(case), results.of("plain")
    check(result, plain, counts)
    assert (result["mode"], plain["mode"]) == (3, 0)
    assert result["v2"] and plain["v2"]
    assert [switch[:2] for switch in result["switches"]] == [[1, 2], [2, 1]]
    assert all(migrated for *_, migrated in result["switches"])


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
