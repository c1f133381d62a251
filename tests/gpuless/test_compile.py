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


def check(
    result: Result,
    plain: Result,
    counts: dict[str, int],
    boundaries: Sequence[int] = BOUNDARIES,
) -> None:
    """An engine has compiled what these counts say and nothing later, runs it, and computes what
    one computes that compiles nothing."""
    assert "failed" not in result, result["failed"]
    for worker in result["workers"]:
        counter = worker["counter"]
        assert {name: counter[name] for name in counts} == counts, counter
        check_code(worker["layouts"], boundaries)
    assert [one["counter"] for one in result["workers after"]] == [
        one["counter"] for one in result["workers"]
    ], "compiled by generating or by switching"
    folders = folders_of(result)
    assert all(folders) and len(set(folders)) == len(folders)
    check_outputs(result, plain)


def check_code(layouts: dict[str, Any], boundaries: Sequence[int]) -> None:
    """Each layout of a rank runs what was compiled for its shapes, strides, group and ranges."""
    for name, layout in layouts.items():
        if "code" not in layout:
            continue
        assert layout["inputs"] == layout["weights"]
        ends = (*boundaries, {"tp1dp2": 1, "tp2dp1": 2}[name] * TOKENS)
        starts = (1, *(end + 1 for end in boundaries))
        ranges = [f"({start}, {end})" for start, end in zip(starts, ends, strict=True)]
        assert layout["ranges"] == layout["ranges of the config"] == ranges
        assert layout["groups"] == ([layout["group"]] if name == "tp2dp1" else [])
    codes = [layout["code"] for layout in layouts.values() if "code" in layout]
    assert len(set(codes)) == len(codes)


def check_outputs(result: Result, plain: Result) -> None:
    """Those of an engine that compiles nothing; across switches, those of its layouts."""
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


def folders_of(result: Result) -> list[str]:
    """Of each layout of each rank, where its artifact is."""
    return [one["folder"] for worker in result["workers"] for one in worker["layouts"].values()]


def cold(layouts: int = 2) -> dict[str, int]:
    """Counts where every layout was compiled, and an artifact saved."""
    made = ("num_graphs_seen", "num_aot_compiles", "num_aot_artifacts_saved")
    return dict.fromkeys(made, layouts) | {"num_aot_artifacts_loaded": 0}


def warm(layouts: int = 2) -> dict[str, int]:
    """Counts where every layout's artifact was loaded, and nothing compiled."""
    more = ("num_backend_compilations", "num_inductor_compiles")
    return dict.fromkeys((*cold(), *more), 0) | {"num_aot_artifacts_loaded": layouts}


@pytest.mark.parametrize("case, counts", [("cold", cold()), ("warm", warm())])
def test_each_layout_runs_its_own_code(results: Program, case: str, counts: dict[str, int]) -> None:
    result, plain = results.of(case), results.of("plain")
    check(result, plain, counts)
    assert (result["mode"], plain["mode"]) == (3, 0)
    assert result["v2"] and plain["v2"]
    assert [switch[:2] for switch in result["switches"]] == [[1, 2], [2, 1]]
    assert all(migrated for *_, migrated in result["switches"])
    folders = folders_of(result)
    assert all(Path(folder).is_file() for folder in folders)
    assert folders == folders_of(results.of("cold"))
    for worker in result["workers"]:
        strided = {name: set(strided_in(one)) for name, one in worker["layouts"].items()}
        assert strided == {"tp1dp2": set(), "tp2dp1": {"o_proj", "down_proj"}}


def strided_in(layout: dict[str, Any]) -> Iterator[str]:
    """The linear layers whose weights the code takes for columns of larger ones, in place."""
    for weight, (shape, stride) in layout["inputs"].items():
        if len(shape) == 2 and stride != [shape[1], 1]:
            yield weight.split("_modules_")[-1].removesuffix("_parameters_weight_")
