"""Models that vLLM compiles as on CUDA, in every layout, with AOT artifacts: cold and warm starts.

The engines run on CPU in a process of their own (`compiled.py`), which answers what each has
compiled and generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpuless.programs import Program, running

pytestmark = pytest.mark.costly

TOLERANCE = 2e-4
"""Of log-probabilities of plain weights on CPU."""
SILENCE = 600.0
"""Seconds: those of a C++ compiler, too."""
CASES = ("plain", "cold", "warm")
BOUNDARIES = (16,)
"""The last number of tokens of each compile range but the last."""
TOKENS = 256
"""Those of a step, for each rank of a group (`compiled.py`)."""

Result = dict[str, Any]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """What engines do, case by case of the module, while tests look at what is done."""
    with running(
        "compiled",
        tmp_path_factory.mktemp("compiled"),
        *request.module.CASES,
        support="compiled_on_cpu",
        silence=SILENCE,
        without=("TORCHDYNAMO_DISABLE",),
        VLLM_LOGGING_LEVEL="INFO",
    ) as program:
        yield program


# ---------------------------------------------------------------- checks


def layouts_of(result: Result, when: str = "workers") -> Iterator[dict[str, Any]]:
    """Every layout of every rank."""
    assert "failed" not in result, result["failed"]
    for worker in result[when]:
        yield from worker["layouts"].values()


def check_counts(result: Result, when: str = "workers", **expected: int) -> None:
    """What vLLM has counted in each worker."""
    assert "failed" not in result, result["failed"]
    for worker in result[when]:
        counts = worker["counter"]
        assert {name: counts[name] for name in expected} == expected, counts


def check_cold(result: Result, layouts: int = 2) -> None:
    """Every layout was compiled, and an artifact saved."""
    check_counts(
        result,
        num_graphs_seen=layouts,
        num_aot_compiles=layouts,
        num_aot_artifacts_saved=layouts,
        num_aot_artifacts_loaded=0,
    )


def check_warm(result: Result, layouts: int = 2) -> None:
    """Every layout's artifact was loaded, and nothing compiled."""
    check_counts(
        result,
        num_aot_artifacts_loaded=layouts,
        num_graphs_seen=0,
        num_backend_compilations=0,
        num_inductor_compiles=0,
        num_aot_compiles=0,
        num_aot_artifacts_saved=0,
    )


def check_nothing_was_compiled_later(result: Result) -> None:
    """Neither by generating nor by switching."""
    assert [one["counter"] for one in result["workers after"]] == [
        one["counter"] for one in result["workers"]
    ]


def check_folders(result: Result) -> None:
    """Each layout of each rank has one of its own."""
    folders = [layout["folder"] for layout in layouts_of(result)]
    assert all(folders)
    assert len(set(folders)) == len(folders)


def check_code(result: Result, boundaries: Sequence[int] = BOUNDARIES) -> None:
    """Each layout runs what was compiled for its shapes, strides, group and ranges."""
    for layout in layouts_of(result):
        assert layout["inputs"] == layout["weights"]
        assert layout["ranges"] == layout["ranges of the config"]
        assert layout["groups"] in ([], [layout["group"]])
    for worker in result["workers"]:
        for name, layout in worker["layouts"].items():
            ends = (*boundaries, {"tp1dp2": 1, "tp2dp1": 2}[name] * TOKENS)
            starts = (1, *(end + 1 for end in boundaries))
            ranges = [f"({start}, {end})" for start, end in zip(starts, ends, strict=True)]
            assert layout["ranges"] == ranges
        codes = [layout["code"] for layout in worker["layouts"].values()]
        assert len(set(codes)) == len(codes)
        assert worker["layouts"]["tp2dp1"]["groups"]


def check_outputs(result: Result, plain: Result) -> None:
    """Those of an engine that compiles nothing; across switches, those of its layouts."""
    assert "failed" not in result, result["failed"]
    assert plain["runs"].keys() == {"tp=1", "tp=2", "there and back"}
    for run, outcomes in result["runs"].items():
        references = [plain["runs"][name] for name in (["tp=1", "tp=2"] if "and" in run else [run])]
        assert outcomes.keys() == references[0].keys()
        for name, outcome in outcomes.items():
            for reference in references:
                assert outcome["token_ids"] == reference[name]["token_ids"], (run, name)
            found = zip(
                outcome["logprobs"], *(one[name]["logprobs"] for one in references), strict=True
            )
            apart = [min(abs(one - other) for other in others) for one, *others in found]
            assert len(apart) >= 12 and max(apart) <= TOLERANCE, (run, name, apart)
    for tp, scores in result["scores"].items():
        for name, score in scores.items():
            assert score == pytest.approx(plain["scores"][tp][name], abs=TOLERANCE), (tp, name)


# ---------------------------------------------------------------- tests


def test_a_cold_start_compiles_each_layout_and_keeps_it(results: Program) -> None:
    check_cold(results.of("cold"))


def test_a_warm_start_compiles_nothing(results: Program) -> None:
    check_warm(results.of("warm"))


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_generating_and_switching_compile_nothing(results: Program, case: str) -> None:
    check_nothing_was_compiled_later(results.of(case))


def test_each_layout_of_each_rank_has_an_artifact(results: Program) -> None:
    cold, warm = results.of("cold"), results.of("warm")
    check_folders(cold)
    assert all(Path(layout["folder"]).is_file() for layout in layouts_of(cold))
    for before, after in zip(layouts_of(cold), layouts_of(warm), strict=True):
        assert before["folder"] == after["folder"]


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_each_layout_runs_its_own_code(results: Program, case: str) -> None:
    check_code(results.of(case))


def test_weights_in_place_are_compiled_as_columns_of_larger_ones(results: Program) -> None:
    for worker in results.of("warm")["workers"]:
        strided = {name: set(strided_in(one)) for name, one in worker["layouts"].items()}
        assert strided == {"tp1dp2": set(), "tp2dp1": {"o_proj", "down_proj"}}


def strided_in(layout: dict[str, Any]) -> Iterator[str]:
    """The linear layers whose weights the code takes for parts of larger ones."""
    for weight, (shape, stride) in layout["inputs"].items():
        if len(shape) == 2 and stride != [shape[1], 1]:
            yield weight.split("_modules_")[-1].removesuffix("_parameters_weight_")


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_outputs_are_those_of_an_engine_that_compiles_nothing(results: Program, case: str) -> None:
    result, plain = results.of(case), results.of("plain")
    assert (result["mode"], plain["mode"]) == (3, 0)
    assert result["v2"] and plain["v2"]
    check_outputs(result, plain)
    assert [switch[:2] for switch in result["switches"]] == [[1, 2], [2, 1]]
    assert all(migrated for *_, migrated in result["switches"])
