"""Length traces: generators and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pat_vllm.simulator import shapes
from pat_vllm.simulator.traces import LengthTrace, load_trace

GENERATORS: dict[str, Callable[[int], LengthTrace]] = {
    **{name: partial(make, 104, 8192) for name, make in shapes.GENERATORS.items()},
    "staggered": lambda seed: shapes.staggered(104, 1000, 1.0, 8192, 0.5, seed=seed),
    "shifted": lambda seed: shapes.shifted([500, 900], 104, 0.5, 8192, seed)[1],
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_seeded_and_files_round_trip(tmp_path: Path, name: str) -> None:
    trace = GENERATORS[name](1)
    assert trace == GENERATORS[name](1)
    assert trace.lengths != GENERATORS[name](2).lengths
    assert len(trace.trajectories) == 104
    (tmp_path / "trace.json").write_text(json.dumps(asdict(trace)))
    assert load_trace(tmp_path / "trace.json") == trace


def test_lengths_have_the_distribution_of_their_generator() -> None:
    logs = np.log(shapes.lognormal(20000, 1000, 0.7, 1_000_000).lengths)
    assert np.exp(np.median(logs)) == pytest.approx(1000, rel=0.03)
    assert logs.std() == pytest.approx(0.7, rel=0.03)

    two_mode = np.array(shapes.two_mode(20000).lengths)
    assert (two_mode > 10000).mean() == pytest.approx(0.1, abs=0.01)
    assert ((two_mode > 6000) & (two_mode < 10000)).mean() < 0.01
    assert (two_mode == 16384).mean() == pytest.approx(0.01, abs=0.004)

    uniform = shapes.uniform(2000, 5, 9)
    assert set(uniform.lengths) == {5, 6, 7, 8, 9} and uniform.max_tokens == 9

    straggler = sorted(shapes.straggler(64, 200, 8000).lengths)
    assert straggler[-1] == 8000 and straggler[0] >= 190 and straggler[-2] <= 210

    batches = shapes.shifted([500, 2000], 4000, 0.5, 100_000)
    assert [np.median(batch.lengths) for batch in batches] == pytest.approx([500, 2000], rel=0.05)

    deepscaler = np.array(shapes.deepscaler(100_000).lengths)  # the shares that PAT reports
    assert (deepscaler > 8192).mean() == pytest.approx(0.1085, abs=0.003)
    assert 2.6 < 128 * (deepscaler == 24576).mean() < 3.0
    assert len(shapes.deepscaler()) == 128


def test_arrivals_and_groups() -> None:
    trace = shapes.staggered(2000, 100, 1.0, 8192, 0.5)
    assert trace.arrivals[0] == 0 and list(trace.arrivals) == sorted(trace.arrivals)
    assert np.diff(trace.arrivals).mean() == pytest.approx(0.5, rel=0.1)
    trace = shapes.grpo(2000, 4, 0.5, 1.0, max_tokens=10_000_000)
    assert trace.groups[:5] == (0, 0, 0, 0, 1)
    assert len(set(trace.num_prompt_tokens[:4])) == 1
    logs = np.log(trace.lengths).reshape(2000, 4)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.8, abs=0.03)


def test_files_of_users(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    expected = LengthTrace("measured", (3, 70, 5), (0.0,) * 3, (0, 1, 2), (256,) * 3, 70)
    for text in ("3\n70\n5\n", "length\n3\n\n70  # long\n5,\n", "# a\n3\n70\n5"):
        path.write_text(text)
        assert load_trace(path) == expected
    path = tmp_path / "some.json"
    path.write_text('{"lengths": [4, 9], "max_tokens": 12, "arrivals": [0, 1.5]}')
    trace = load_trace(path)
    assert (trace.name, trace.max_tokens, trace.arrivals) == ("some", 12, (0.0, 1.5))
    path.write_text('{"lengths": [4, 9], "num_prompt_tokens": [7, 8]}')
    assert load_trace(path).num_prompt_tokens == (7, 8)


def test_turns_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(
        '{"lengths": [9, 5, 2], "num_prompt_tokens": [4, 6, 20], "arrivals": [0, 0, 2.5], '
        '"after": [-1, -1, 0]}'
    )
    trace = load_trace(path)
    assert (trace.first, trace.trajectories) == ((0, 1, 0), {0: 2, 1: 1})
    assert (trace.followed, trace.max_tokens, trace.longest) == ((9, 5, 18), 18, 24)
    assert trace.with_prompts(3).num_prompt_tokens == (3, 3, 19)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "it has no lengths"),
        ("a.txt", "length\n3\nmany\n", "line 3 must be one length in tokens, got 'many'"),
        ("a.txt", "0\n", "line 1 must be one length in tokens, got '0'; allowed are whole"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[1]", "expected a JSON object"),
        ("a.json", '{"lengths": [1.5]}', "lengths.0: Input should be a valid integer"),
        ("a.json", '{"lengths": [1], "colour": 1}', "colour: Unexpected keyword argument"),
        ("a.json", '{"lengths": [9], "max_tokens": 8}', "max_tokens=8"),
        ("a.json", '{"lengths": [9], "groups": [1, 2]}', "1 lengths but 2 groups"),
        (
            "a.json",
            '{"lengths": [9], "arrivals": [-1]}',
            "arrivals.0: Input should be",
        ),
        ("a.json", '{"lengths": [9, 9], "after": [-1]}', "2 lengths but 1 after"),
        ("a.json", '{"lengths": [9, 9], "after": [1, -1]}', "request 0 continues 1, which is no"),
        (
            "a.json",
            '{"lengths": [9, 9, 9], "num_prompt_tokens": [4, 13, 13], "after": [-1, 0, 0]}',
            "request 2 continues 0, which is no earlier one, or which another continues",
        ),
        (
            "a.json",
            '{"lengths": [9, 9], "num_prompt_tokens": [4, 12], "after": [-1, 0]}',
            "request 1 has a prompt of 12 tokens and continues one that held 13",
        ),
        (
            "a.json",
            '{"lengths": [9, 9], "num_prompt_tokens": [4, 20], "after": [-1, 0], "max_tokens": 24}',
            "a trajectory is 25; max_tokens=24",
        ),
    ],
)
def test_wrong_files_are_errors(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a length trace") as caught:
        load_trace(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
