"""What vLLM offers for a request, with speculation, across switches, against stock vLLM without.

A batch as in `tests/test_features.py`, whose checks are used again; what draws random numbers is
in `test_sampled.py`. vLLM refuses `min_p` and `logit_bias` beside speculation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

import pat_vllm
from tests import test_features as without
from tests.speculation.batch import CHUNK, leave_clean, stock
from tests.speculation.steps import LENGTHS, MOST, acceptance, requests_of, switch, watched
from tests.test_features import Job, Script, add, drive, greedy, prompt, run, scheduler_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean")]

assert CHUNK == without.CHUNK

RUNS: dict[str, Script] = {
    "tp=1": {0: 1},
    "tp=2": {0: 2},
    "switches from tp=1": {0: 1, 2: 2, 6: 1, 11: 2, 18: 1},
    "switches from tp=2": {0: 2, 1: 1, 3: 2, 4: 1, 5: 2, 9: 1, 16: 2},
    "recomputing switches": {0: 1, 3: 2, 7: 1, 13: 2},
}
"""Run -> engine step -> tp; with the most drafts in a single layout, else with any number."""


def test_what_vllm_refuses(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    # A greedy request has no `min_p`, whatever it asks for.
    for sampling in ({"min_p": 0.1, "temperature": 1.0}, {"logit_bias": {5: 1.0}}):
        with pytest.raises(
            VLLMValidationError, match="not yet supported with speculative decoding"
        ):
            add(llm, {"refused": Job([5, 6, 7], greedy(5, **sampling))})


# ---------------------------------------------------------------- the batch


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """Stock vLLM without speculation."""
    with stock() as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(reference: Any) -> Any:
    add(reference, {"plain": Job(prompt(1, 20), greedy(50))})
    return drive_stock(reference)["plain"].outputs[0]


def drive_stock(llm: Any) -> dict[str, Any]:
    """The final outputs of an engine that is not PAT's."""
    outputs: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        outputs |= {one.request_id: one for one in llm.llm_engine.step()}
    return outputs


from tests.test_features import jobs as jobs_without  # noqa: E402, F401


@pytest.fixture(scope="module")
def jobs(jobs_without: dict[str, Job], plain: Any) -> dict[str, Job]:  # noqa: F811
    """Those of `tests/test_features.py`, but greedy, and without what vLLM refuses."""
    found = {}
    for name, job in jobs_without.items():
        if "n" in job.sampling:
            continue  # greedy ones are alike
        kept = {key: one for key, one in job.sampling.items() if key not in ("logit_bias", "min_p")}
        found[name] = Job(job.prompt, kept | {"temperature": 0.0})
    tokens = list(plain.token_ids)
    # In the middle of runs of accepted drafts, somewhere.
    for at in range(20, 45, 3):
        found[f"stop token {at}"] = Job(prompt(1, 20), greedy(50, stop_token_ids=[tokens[at]]))
        found[f"max_tokens {at}"] = Job(prompt(1, 20), greedy(at))
    found["min tokens"] = Job(
        prompt(1, 20), greedy(50, min_tokens=24, stop_token_ids=sorted(set(tokens)))
    )
    found["max_model_len"] = Job(prompt(17, 440), greedy(100, logprobs=0))
    return found


@pytest.fixture(scope="module")
def runs(llm: Any, reference: Any, jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    """Final outputs by run and feature; "tp=1" is stock vLLM's, without speculation."""
    rng = random.Random(7)
    costs = scheduler_of(llm).controller.costs
    add(reference, jobs)
    results = {"tp=1": drive_stock(reference)}
    for name, script in RUNS.items():
        leave_clean(llm)
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
        results[f"{name}, drafts"] = {one: found[-1] for one, found in outputs.items()}
        made = [one for one in pat_vllm.report(llm).switches[before:] if one.num_seqs]
        assert len(made) == len(script) - 1
    costs.mode = "migrate"
    return results


@pytest.fixture(params=RUNS)
def outcome(request: pytest.FixtureRequest, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Outputs by feature in one of the runs."""
    return runs[f"{request.param}, drafts"]


def test_the_batch_asks_for_what_it_should(
    runs: dict[str, dict[str, Any]], jobs: dict[str, Job]
) -> None:
    for name, output in runs["tp=1"].items():
        found = output.outputs[0]
        if name.startswith(("stop", "min tokens")):
            assert found.finish_reason == "stop", name
        if name.startswith("max"):
            assert found.finish_reason == "length", name
    tokens = runs["tp=1"]["max_model_len"].outputs[0].token_ids
    assert len(tokens) == 512 - 440
    assert len(runs["tp=1"]["min tokens"].outputs[0].token_ids) > 24


# At a draft length of 1, so that as many steps as without speculation go by.
from tests.test_features import (  # noqa: E402, F401
    test_logprobs,
    test_outputs_equal_those_of_one_layout,
    test_penalties_have_an_effect,
    test_prompt_logprobs,
    test_stop_strings,
    test_stop_token,
    test_structured_outputs,
    test_token_restrictions,
)

# ---------------------------------------------------------------- what depends on how many come


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_streaming(llm: Any, kind: str, runs: dict[str, dict[str, Any]], jobs: Any) -> None:
    """Pieces of several tokens come in order, once each, and add up to the whole."""
    from vllm.sampling_params import RequestOutputKind

    names = ["plain", "logprobs", "stop string", "prompt logprobs"]
    kinds = {"output_kind": RequestOutputKind[kind]}
    pat_vllm.speculate(llm, MOST)
    add(llm, {name: Job(jobs[name].prompt, {**jobs[name].sampling, **kinds}) for name in names})
    streams = drive(llm, {5: 2, 9: 1})
    for name in names:
        whole, pieces = runs["tp=1"][name].outputs[0], [o.outputs[0] for o in streams[name]]
        assert 3 < len(pieces) < len(whole.token_ids)
        assert [output.finished for output in streams[name]] == [False] * (len(pieces) - 1) + [True]
        if kind == "DELTA":
            assert [t for piece in pieces for t in piece.token_ids] == list(whole.token_ids)
            assert max(len(piece.token_ids) for piece in pieces) > 1
            assert "".join(piece.text for piece in pieces) == whole.text
        else:
            for shorter, longer in itertools.pairwise(pieces):
                assert longer.text.startswith(shorter.text)
            assert list(pieces[-1].token_ids) == list(whole.token_ids)
            assert pieces[-1].text == whole.text


def test_preemption(llm: Any, reference: Any) -> None:
    """With more requests than there is room for, in each layout and across switches."""
    crowd = {f"r{i}": Job(prompt(700 + i, 200), greedy(130 + i, logprobs=0)) for i in range(32)}
    add(reference, crowd)
    expected = drive_stock(reference)

    def at_step(step: int) -> None:
        if step in (12, 24):
            switch(llm, 2 if step == 12 else 1)
        watch.k = (1, MOST, 2)[step % 3]
        pat_vllm.speculate(llm, watch.k)

    before = without.metrics(llm).get("num_preemptions", 0)
    add(llm, crowd)
    with watched() as watch, acceptance(llm):
        done = drive(llm, None, at_step)
    assert without.metrics(llm)["num_preemptions"] > before + 3
    for name in crowd:
        without.assert_same(done[name][-1], expected[name])


def test_metrics_count_the_drafts_of_all_replicas(llm: Any) -> None:
    """vLLM's own counters say what the report says."""

    def spec_decode() -> tuple[float, float]:
        counts = without.metrics(llm)
        names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        return tuple(counts.get(name, 0) for name in names)  # type: ignore[return-value]

    from tests.speculation.steps import counted

    before, reported = spec_decode(), counted(llm)
    pat_vllm.speculate(llm, MOST)
    run(llm, {f"r{i}": Job(prompt(400 + i, 30), greedy(40)) for i in range(4)}, {0: 1, 9: 2})
    gained = [now - then for now, then in zip(spec_decode(), before, strict=True)]
    assert gained == [now - then for now, then in zip(counted(llm), reported, strict=True)]
    assert gained[0] > gained[1] > 20
    assert not requests_of(llm)
