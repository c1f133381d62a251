"""What vLLM offers for a request, with speculation, across switches, against stock vLLM without.

The batch of `tests/engine/test_features.py`; what draws random numbers is in `test_sampled.py`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import vllm

import pat_vllm
from tests.engine import test_features as features
from tests.engine.specs import DRAFTS
from tests.engine.speculation.batch import without_drafts
from tests.engine.speculation.steps import acceptance, switch, watched
from tests.engine.test_features import (  # noqa: F401
    Script,
    add,
    drive,
    greedy,
    metrics,
    plain,
    prompt,
    run,
    streamed,
)
from tests.engine.test_features import jobs as jobs_without  # noqa: F401
from tests.support.engines import Job, Outcome, scheduler_of
from tests.support.pool import EnginePool, go_home
from tests.support.same import assert_same
from tests.vllm.scheduler.protocol import LENGTHS, MOST

pytestmark = pytest.mark.engine(DRAFTS)

RUNS: dict[str, Script] = {
    "tp=1": {0: 1},
    "tp=2": {0: 2},
    "switches from tp=1": {0: 1, 2: 2, 6: 1, 11: 2, 18: 1},
    "switches from tp=2": {0: 2, 1: 1, 3: 2, 4: 1, 5: 2, 9: 1, 16: 2},
    "recomputing switches": {0: 1, 3: 2, 7: 1, 13: 2},
}
"""Run -> engine step -> tp; with the most drafts in a single layout, else with any number."""
KEEPS_WHAT_FOLLOWS = vllm.__version__.startswith("0.31")
"""That vLLM keeps the tokens that a step has sampled behind a stop string, without PAT, too."""
REFUSED = ("logit_bias", "min_p")
"""vLLM refuses them beside speculation."""


@pytest.fixture
def jobs(jobs_without: dict[str, Job], plain: Any) -> dict[str, Job]:  # noqa: F811
    """Greedy ones, and more that end in the middle of runs of accepted drafts."""
    jobs = {}
    for name, job in jobs_without.items():
        if "n" not in job.sampling:  # greedy samples are alike
            kept = {key: value for key, value in job.sampling.items() if key not in REFUSED}
            jobs[name] = Job(job.prompt, kept | {"temperature": 0.0})
    tokens = list(plain.token_ids)
    for at in range(20, 45, 3):
        jobs[f"stop token {at}"] = Job(prompt(1, 20), greedy(50, stop_token_ids=[tokens[at]]))
        jobs[f"max_tokens {at}"] = Job(prompt(1, 20), greedy(at))
    jobs["min tokens"] = Job(
        prompt(1, 20), greedy(50, min_tokens=24, stop_token_ids=sorted(set(tokens)))
    )
    jobs["max_model_len"] = Job(prompt(17, 440), greedy(100, logprobs=0))
    return jobs


@pytest.fixture
def runs(llm: Any, jobs: dict[str, Job], engines: EnginePool) -> dict[str, dict[str, Any]]:
    """Final outputs by run and feature; "tp=1" is without drafts."""
    return engines.keep("runs", lambda: run_all(llm, jobs))


def run_all(llm: Any, jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    rng = random.Random(7)
    costs = scheduler_of(llm).controller.costs
    pat_vllm.speculate(llm, 0)
    results = {"tp=1": run(llm, jobs, {0: 1})}
    for name, script in RUNS.items():
        go_home(llm)
        costs.mode = "recompute" if "recomputing" in name else "migrate"
        lengths = LENGTHS if len(script) > 1 else (MOST,)

        def at_step(step: int, lengths: Any = lengths) -> None:
            watch.k = rng.choice(lengths)
            pat_vllm.speculate(llm, watch.k)

        before = len(pat_vllm.report(llm).switches)
        with watched() as watch, acceptance(llm):
            assert pat_vllm.switch(llm, tp=script[0])
            add(llm, jobs)
            outputs = drive(llm, script, at_step)
        last = {request: pieces[-1] for request, pieces in outputs.items()}
        if KEEPS_WHAT_FOLLOWS:
            cut_behind_stop_strings(last, results["tp=1"])
        results[f"{name}, drafts"] = last
        switches = [s for s in pat_vllm.report(llm).switches[before:] if s.num_seqs]
        assert len(switches) == len(script) - 1
    costs.mode = "migrate"
    go_home(llm)
    return results


def cut_behind_stop_strings(outputs: dict[str, Any], without_drafts: dict[str, Any]) -> None:
    """Leave of what a stop string has ended as many tokens as come one by one."""
    for name, output in outputs.items():
        (completion,) = output.outputs
        if isinstance(completion.stop_reason, str):
            length = len(without_drafts[name].outputs[0].token_ids)
            assert len(completion.token_ids) < length + MOST + 1
            completion.token_ids = completion.token_ids[:length]
            completion.logprobs = completion.logprobs and completion.logprobs[:length]


def outcomes_of(outputs: Mapping[str, Any]) -> dict[str, Outcome]:
    outcomes = {}
    for name, output in outputs.items():
        outcomes[name] = Outcome()
        outcomes[name].take(output, piece=False)
    return outcomes


def assert_as_stock(outputs: Mapping[str, Any], jobs: Mapping[str, Job]) -> None:
    """They are what stock vLLM gives without speculation."""
    assert_same(outcomes_of(outputs), without_drafts(jobs))


@pytest.mark.parametrize("name", RUNS)
def test_outputs_are_those_without_drafts(
    name: str, runs: dict[str, dict[str, Any]], jobs: dict[str, Job]
) -> None:
    outputs = runs[f"{name}, drafts"]
    assert outputs.keys() == jobs.keys()
    assert_as_stock(outputs, jobs)
    for feature, output in outputs.items():
        try:
            features.assert_same(output, runs["tp=1"][feature])
        except AssertionError as error:
            error.add_note(f"feature: {feature}")
            raise
        ending = "stop" if feature.startswith(("stop", "min tokens")) else None
        ending = "length" if feature.startswith("max") else ending
        assert ending in (None, output.outputs[0].finish_reason), feature
    assert len(outputs["max_model_len"].outputs[0].token_ids) == 512 - 440
    assert len(outputs["min tokens"].outputs[0].token_ids) > 24


# ---------------------------------------------------------------- what depends on how many come


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_streaming(llm: Any, kind: str, runs: dict[str, dict[str, Any]], jobs: Any) -> None:
    """Pieces of several tokens."""
    names = ["plain", "logprobs", "stop string", "prompt logprobs"]
    if KEEPS_WHAT_FOLLOWS:
        names.remove("stop string")
    subset, expected = {name: jobs[name] for name in names}, runs["tp=1"]
    pat_vllm.speculate(llm, MOST)
    for name, pieces in streamed(llm, kind, subset, {5: 2, 9: 1}, expected).items():
        assert 3 < len(pieces) < len(expected[name].outputs[0].token_ids)


def test_preemption(llm: Any) -> None:
    """With more requests than there is room for, in each layout and across switches."""
    crowd = {f"r{i}": Job(prompt(700 + i, 200), greedy(130 + i, logprobs=0)) for i in range(32)}

    def at_step(step: int) -> None:
        if step in (12, 24):
            switch(llm, 2 if step == 12 else 1)
        watch.k = (1, MOST, 2)[step % 3]
        pat_vllm.speculate(llm, watch.k)

    before = metrics(llm).get("num_preemptions", 0)
    add(llm, crowd)
    with watched() as watch, acceptance(llm):
        done = drive(llm, None, at_step)
    assert metrics(llm)["num_preemptions"] > before + 3
    assert_as_stock({name: outputs[-1] for name, outputs in done.items()}, crowd)
