"""Models that vLLM compiles as on CUDA, in every layout, with AOT artifacts: cold and warm starts.

The engines run on CPU in a process of their own (`tests/gpuless/compiled.py`), which writes down
what each has compiled and generated. Some of them make a mistake on purpose.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpuless.compiled import CASES
from tests.support.child import Child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support" / "compiled_on_cpu"
TOLERANCE = 2e-4
"""Of log-probabilities of plain weights on CPU; see `tests/test_switch.py`."""
SILENCE = 600.0
"""Seconds: those of a C++ compiler, too."""
ALWAYS = ("plain", "cold", "warm")
BOUNDARIES = (16,)
"""The last number of tokens of each compile range but the last."""
TOKENS = 256
"""Those of a step, for each rank of a group (`tests/gpuless/compiled.py`)."""


class Results:
    """What the child has written down, and will."""

    def __init__(self, child: Child, out: Path) -> None:
        self._child = child
        self._out = out

    def made(self) -> dict[str, Any]:
        """By case, as far as they are done."""
        lines = self._out.read_text().split("\n")[:-1] if self._out.exists() else []
        return dict(map(json.loads, lines))

    def of(self, case: str) -> dict[str, Any]:
        """A case's result, which may be still to come."""
        self._child.wait_for(lambda: case in self.made(), case)
        return self.made()[case]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """What the engines do, in a process that works on while tests look at what is done."""
    folder = tmp_path_factory.mktemp("compiled")
    mine = [item for item in request.session.items if item.path == request.path]
    nightly = any(item.get_closest_marker("nightly") for item in mine)
    wanted = [case for case in CASES if nightly or case in ALWAYS]
    path = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
    }
    environment.pop("TORCHDYNAMO_DISABLE", None)
    command = [sys.executable, "-m", "tests.gpuless.compiled", str(folder), *wanted]
    child = Child(command, folder / "log", silence=SILENCE, cwd=ROOT, env=environment)
    found = Results(child, folder / "results.jsonl")
    try:
        yield found
        if found.made().keys() >= set(wanted):
            assert child.wait() == 0, child.tail()
    finally:
        child.kill()


# ---------------------------------------------------------------- checks


def layouts_of(result: dict[str, Any], when: str = "workers") -> Iterator[dict[str, Any]]:
    """Every layout of every rank."""
    assert "failed" not in result, result["failed"]
    for worker in result[when]:
        yield from worker["layouts"].values()


def check_counts(result: dict[str, Any], when: str = "workers", **expected: int) -> None:
    """What vLLM has counted in each worker."""
    assert "failed" not in result, result["failed"]
    for worker in result[when]:
        counts = worker["counter"]
        assert {name: counts[name] for name in expected} == expected, counts


def check_cold(result: dict[str, Any], layouts: int = 2) -> None:
    """Every layout was compiled, and an artifact saved."""
    check_counts(
        result,
        num_graphs_seen=layouts,
        num_aot_compiles=layouts,
        num_aot_artifacts_saved=layouts,
        num_aot_artifacts_loaded=0,
    )


def check_warm(result: dict[str, Any], layouts: int = 2) -> None:
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


def check_nothing_was_compiled_later(result: dict[str, Any]) -> None:
    """Neither by generating nor by switching."""
    assert [one["counter"] for one in result["workers after"]] == [
        one["counter"] for one in result["workers"]
    ]


def check_folders(result: dict[str, Any]) -> None:
    """Each layout of each rank has one of its own."""
    folders = [layout["folder"] for layout in layouts_of(result)]
    assert all(folders)
    assert len(set(folders)) == len(folders)


def check_code(result: dict[str, Any], boundaries: Sequence[int] = BOUNDARIES) -> None:
    """Each layout runs what was compiled for its shapes, strides, group and ranges."""
    for layout in layouts_of(result):
        assert layout["inputs"] == layout["weights"]
        assert layout["ranges"] == layout["ranges of the config"]
        assert layout["groups"] in ([], [layout["group"]])
    for worker in result["workers"]:
        for name, tp in {"tp1dp2": 1, "tp2dp1": 2}.items():
            ends = (*boundaries, tp * TOKENS)
            starts = (1, *(end + 1 for end in boundaries))
            ranges = [f"({start}, {end})" for start, end in zip(starts, ends, strict=True)]
            assert worker["layouts"][name]["ranges"] == ranges
        codes = [layout["code"] for layout in worker["layouts"].values()]
        assert len(set(codes)) == len(codes)
        assert worker["layouts"]["tp2dp1"]["groups"]


def check_outputs(result: dict[str, Any], plain: dict[str, Any]) -> None:
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


def test_a_cold_start_compiles_each_layout_and_keeps_it(results: Results) -> None:
    check_cold(results.of("cold"))


def test_a_warm_start_compiles_nothing(results: Results) -> None:
    check_warm(results.of("warm"))


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_generating_and_switching_compile_nothing(results: Results, case: str) -> None:
    check_nothing_was_compiled_later(results.of(case))


def test_each_layout_of_each_rank_has_an_artifact(results: Results) -> None:
    cold, warm = results.of("cold"), results.of("warm")
    check_folders(cold)
    assert all(Path(layout["folder"]).is_file() for layout in layouts_of(cold))
    for before, after in zip(layouts_of(cold), layouts_of(warm), strict=True):
        assert before["folder"] == after["folder"]


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_each_layout_runs_its_own_code(results: Results, case: str) -> None:
    check_code(results.of(case))


def test_weights_in_place_are_compiled_as_columns_of_larger_ones(results: Results) -> None:
    for worker in results.of("warm")["workers"]:
        strided = {name: set(strided_in(one)) for name, one in worker["layouts"].items()}
        assert strided == {"tp1dp2": set(), "tp2dp1": {"o_proj", "down_proj"}}


def strided_in(layout: dict[str, Any]) -> Iterator[str]:
    """The linear layers whose weights the code takes for parts of larger ones."""
    for weight, (shape, stride) in layout["inputs"].items():
        if len(shape) == 2 and stride != [shape[1], 1]:
            yield weight.split("_modules_")[-1].removesuffix("_parameters_weight_")


@pytest.mark.parametrize("case", ["cold", "warm"])
def test_outputs_are_those_of_an_engine_that_compiles_nothing(results: Results, case: str) -> None:
    result, plain = results.of(case), results.of("plain")
    assert (result["mode"], plain["mode"]) == (3, 0)
    assert result["v2"] and plain["v2"]
    check_outputs(result, plain)
    assert [switch[:2] for switch in result["switches"]] == [[1, 2], [2, 1]]
    assert all(migrated for *_, migrated in result["switches"])


@pytest.mark.nightly
@pytest.mark.parametrize("case, layouts", [("other strides", 2), ("one layout", 1)])
def test_weights_of_other_strides_are_compiled_anew(
    results: Results, case: str, layouts: int
) -> None:
    """Beside the artifacts of weights in place, which vLLM would run without a look at strides."""
    result = results.of(case)
    check_cold(result, layouts)
    check_code(result)
    check_outputs(result, results.of("plain"))
    earlier = {one["folder"] for one in layouts_of(results.of("cold"))}
    assert earlier.isdisjoint(one["folder"] for one in layouts_of(result))


@pytest.mark.nightly
def test_a_folder_of_the_users(results: Results) -> None:
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


# ---------------------------------------------------------------- mistakes


def folders_differ(results: Results) -> None:
    result = results.of("one folder, cold")
    check_folders(result)
    check_outputs(result, results.of("plain"))


def ranks_differ(results: Results) -> None:
    check_folders(results.of("one artifact, cold"))


def ranks_run_their_own(results: Results) -> None:
    check_outputs(results.of("one artifact, warm"), results.of("plain"))


def strides_differ(results: Results) -> None:
    check_cold(results.of("lost key, cold"))
    check_cold(results.of("lost key, one layout"), layouts=1)


def models_differ(results: Results) -> None:
    result = results.of("one model")
    check_code(result)
    check_outputs(result, results.of("plain"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "check", [folders_differ, ranks_differ, ranks_run_their_own, strides_differ, models_differ]
)
def test_a_mistake_is_seen(results: Results, check: Callable[[Results], None]) -> None:
    """In engines whose workers make it. Those of the configs are in `test_compile_keys.py`."""
    with pytest.raises(AssertionError):
        check(results)


# ---------------------------------------------------------------- the whole way


@pytest.mark.nightly
def test_compiled_to_machine_code(results: Results) -> None:
    cold, warm = results.of("C++, cold"), results.of("C++, warm")
    check_cold(cold)
    check_warm(warm)
    for result in (cold, warm):
        check_nothing_was_compiled_later(result)
        check_folders(result)
        check_code(result, boundaries=())
        check_outputs(result, results.of("plain"))
