"""What vLLM offers for a request keeps working in every layout and across switches.

One engine of two ranks, driven step by step. A batch in which each request uses another feature
runs in each single layout and with switches at many points, in both directions; every test then
looks at its own request in all of these runs.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import CHUNK, DENSE
from tests.support.counting import PLACES, STOP_THINKING, THINK, assert_counted, counted
from tests.support.engines import OPTIONS, Job, scheduler_of
from tests.support.pool import EnginePool
from tests.support.same import TOLERANCE

pytestmark = pytest.mark.engine(DENSE)

MAX_NUM_SEQS: int = OPTIONS["max_num_seqs"]

SCHEMA = {
    "type": "object",
    "properties": {
        "river": {"enum": ["Aare", "Rhine", "Danube"]},
        "long": {"type": "boolean"},
        "mood": {"enum": ["calm", "wild"]},
    },
    "required": ["river", "long", "mood"],
    "additionalProperties": False,
}


Script = Mapping[int, int]
"""Engine step -> tp to switch to before it. Step 0 is before any request is added."""

RUNS: dict[str, Script] = {
    "tp=1": {0: 1},
    "tp=2": {0: 2},
    # In the middle of prefills (steps 2 to 5), and of decodes.
    "switches from tp=1": {0: 1, 2: 2, 9: 1, 17: 2, 40: 1},
    "switches from tp=2": {0: 2, 1: 1, 3: 2, 4: 1, 5: 2, 13: 1, 28: 2},
    "recomputing switches": {0: 1, 3: 2, 8: 1, 21: 2},
}


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(length)]


def add(llm: Any, jobs: Mapping[str, Job]) -> dict[str, str]:
    """Add requests, which give one output at their end; returns the engine's own ids by ours."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return {
        name: llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": job.prompt},
            SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY, **job.sampling}),
            priority=job.priority,
        )
        for name, job in jobs.items()
    }


def step_every_replica(llm: Any) -> list[Any]:
    """Outputs of as many engine steps as it takes for each replica to finish one of its own.

    Replicas do not wait for each other, and an engine step does not wait for a replica while the
    other one is idle; without this, what is reached at a given step would depend on the machine.
    """
    outputs = llm.llm_engine.step()
    replicas = scheduler_of(llm).replica_set.replicas
    begun = [(replica, replica.in_flight[0]) for replica in replicas if replica.in_flight]
    while any(replica.in_flight and replica.in_flight[0] is step for replica, step in begun):
        outputs += llm.llm_engine.step()
    return outputs


def drive(
    llm: Any,
    script: Script | None = None,
    at_step: Callable[[int], object] = lambda step: None,
    at_first_output: Callable[[str], object] = lambda request_id: None,
) -> dict[str, list[Any]]:
    """Step until all requests are done; all outputs by request.

    Args:
        at_step: called before each step, after a switch of `script`.
    """
    outputs: dict[str, list[Any]] = {}
    step = 1
    while llm.llm_engine.has_unfinished_requests():
        if script and step in script:
            assert pat_vllm.switch(llm, tp=script[step])
        at_step(step)
        for output in step_every_replica(llm):
            if output.request_id not in outputs:
                at_first_output(output.request_id)
            outputs.setdefault(output.request_id, []).append(output)
        step += 1
        assert step < 5_000, "the engine makes no progress"
    return outputs


def run(llm: Any, jobs: Mapping[str, Job], script: Script) -> dict[str, Any]:
    """The final output of each job."""
    assert pat_vllm.switch(llm, tp=script[0])
    add(llm, jobs)
    return {name: outputs[-1] for name, outputs in drive(llm, script).items()}


def greedy(max_tokens: int, **sampling: Any) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}


def seeded(max_tokens: int, seed: int, **sampling: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.9, "seed": seed, "logprobs": 1, **sampling}
    return {"max_tokens": max_tokens, "ignore_eos": True, **sampling}


# ---------------------------------------------------------------- one request per feature


@pytest.fixture
def plain(llm: Any, engines: EnginePool) -> Any:
    """What a greedy request gives, from which stop conditions are taken."""

    def generate() -> Any:
        return run(llm, {"plain": Job(prompt(1, 20), greedy(50))}, {0: 1})["plain"].outputs[0]

    return engines.keep("plain", generate)


def plain_words(llm: Any, plain: Any) -> list[str]:
    return [llm.get_tokenizer().decode([token]) for token in plain.token_ids[:25]]


@pytest.fixture
def jobs(llm: Any, plain: Any) -> dict[str, Job]:
    from vllm.sampling_params import StructuredOutputsParams

    eos = 1
    stop = plain.text[len(plain.text) // 2 :][:3]
    tokenizer = llm.get_tokenizer()
    bad_word = next(
        word
        for word in plain_words(llm, plain)
        if word.isalpha() and len(tokenizer.encode(word, add_special_tokens=False)) == 1
    )
    # Its bytes are whole characters, from which a text can go on.
    text = tokenizer.encode("Describe a river: ")
    plain_prompt = prompt(1, 20)
    structured = StructuredOutputsParams(json=SCHEMA)
    return {
        "plain": Job(plain_prompt, greedy(50)),
        "stop string": Job(plain_prompt, greedy(50, stop=[stop])),
        "stop string kept": Job(
            plain_prompt, greedy(50, stop=[stop], include_stop_str_in_output=True)
        ),
        "stop token": Job(plain_prompt, greedy(50, stop_token_ids=[plain.token_ids[30]])),
        "min tokens": Job(
            prompt(2, 30),
            greedy(50, min_tokens=24, logit_bias={eos: 100.0}) | {"ignore_eos": False},
        ),
        "logprobs": Job(prompt(3, 40), greedy(30, logprobs=5)),
        "prompt logprobs": Job(prompt(4, 3 * CHUNK + 10), greedy(20, prompt_logprobs=3)),
        "seeded": Job(prompt(5, 50), seeded(45, 1)),
        "seeded, filtered": Job(prompt(6, 25), seeded(45, 2, top_k=20, top_p=0.9, min_p=0.01)),
        "presence penalty": Job(plain_prompt, greedy(40, presence_penalty=1.5, logprobs=2)),
        "frequency penalty": Job(plain_prompt, greedy(40, frequency_penalty=1.2, logprobs=2)),
        "repetition penalty": Job(plain_prompt, greedy(40, repetition_penalty=1.4, logprobs=2)),
        "seeded, all penalties": Job(
            prompt(7, 50),
            seeded(40, 3, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1),
        ),
        "allowed tokens": Job(prompt(8, 15), greedy(30, allowed_token_ids=[50, 51, 52, 53])),
        "bad words": Job(plain_prompt, greedy(30, bad_words=[bad_word])),
        "JSON": Job(text, seeded(80, 4, structured_outputs=structured, ignore_eos=False)),
        "regex": Job(
            text,
            seeded(
                60,
                5,
                structured_outputs=StructuredOutputsParams(regex="(ab|cd){5}-[0-9]{6}"),
                ignore_eos=False,
            ),
        ),
        "several samples": Job(prompt(11, 35), seeded(30, 6, n=3)),
        "thinking": Job(
            [*prompt(14, 20), *tokenizer.encode(THINK)], greedy(50, thinking_token_budget=6)
        ),
        **{
            f"counted in {place}": Job(prompt(15, 30), greedy(45, **counted(place)))
            for place in (*PLACES, "adapter")
        },
        "one token": Job(prompt(12, 70), greedy(1, logprobs=1)),
        "long": Job(prompt(13, 200), greedy(100, logprobs=0)),
    }


@pytest.fixture
def runs(llm: Any, jobs: dict[str, Job], engines: EnginePool) -> dict[str, dict[str, Any]]:
    """Outputs by run and feature."""
    return engines.keep("runs", lambda: run_all(llm, jobs))


def run_all(llm: Any, jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    costs = scheduler_of(llm).controller.costs
    results = {}
    for name, script in RUNS.items():
        costs.mode = "recompute" if "recomputing" in name else "migrate"  # as `kv_transfer` sets it
        count = len(pat_vllm.report(llm).switches)
        results[name] = run(llm, jobs, script)
        switches = [s for s in pat_vllm.report(llm).switches[count:] if s.num_seqs]
        assert len(switches) == len(script) - 1
        carried = "recomputed" if "recomputing" in name else "migrated"
        # Before the first step there is nothing to carry but the queue.
        assert sum(getattr(switch, carried) > 0 for switch in switches) >= len(script) - 2
    costs.mode = "migrate"
    assert llm.reset_prefix_cache()
    return results


@pytest.fixture(params=RUNS)
def outcome(request: pytest.FixtureRequest, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Outputs by feature in one of the runs."""
    return runs[request.param]


def chosen(entries: Any, token_ids: list[int]) -> list[float]:
    return [entry[token].logprob for entry, token in zip(entries, token_ids, strict=True)]


def top(entry: Any) -> list[float]:
    """Log-probabilities of a position, best first; tokens that nearly tie may change places."""
    return sorted((logprob.logprob for logprob in entry.values()), reverse=True)


def assert_same(output: Any, other: Any) -> None:
    """Two outputs of a request are equal, log-probabilities to the tolerance."""
    assert output.finished and other.finished
    assert output.prompt_token_ids == other.prompt_token_ids
    assert len(output.outputs) == len(other.outputs)
    for a, b in zip(output.outputs, other.outputs, strict=True):
        assert list(a.token_ids) == list(b.token_ids)
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None:
            assert len(a.logprobs) == len(a.token_ids)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert top(x) == pytest.approx(top(y), abs=TOLERANCE)
            own, theirs = (chosen(o.logprobs, o.token_ids) for o in (a, b))
            assert own == pytest.approx(theirs, abs=TOLERANCE)
    assert (output.prompt_logprobs is None) == (other.prompt_logprobs is None)
    if output.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None and other.prompt_logprobs[0] is None
        pairs = zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
        for position, (x, y) in enumerate(pairs):
            assert top(x) == pytest.approx(top(y), abs=TOLERANCE), position


def test_outputs_equal_those_of_one_layout(
    outcome: dict[str, Any], runs: dict[str, dict[str, Any]], jobs: dict[str, Job]
) -> None:
    assert set(outcome) == set(jobs)
    for feature, output in outcome.items():
        try:
            assert_same(output, runs["tp=1"][feature])
        except AssertionError as error:
            error.add_note(f"feature: {feature}")
            raise


def test_stop_strings(outcome: dict[str, Any], plain: Any, jobs: dict[str, Job]) -> None:
    (stop,) = jobs["stop string"].sampling["stop"]
    end = plain.text.index(stop)
    cut, kept = outcome["stop string"].outputs[0], outcome["stop string kept"].outputs[0]
    assert (cut.text, kept.text) == (plain.text[:end], plain.text[: end + len(stop)])
    for output in (cut, kept):
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert list(output.token_ids) == list(plain.token_ids)[: len(output.token_ids)]


def test_stop_token(outcome: dict[str, Any], plain: Any) -> None:
    output, stop = outcome["stop token"].outputs[0], plain.token_ids[30]
    assert list(output.token_ids) == list(plain.token_ids)[: plain.token_ids.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens(outcome: dict[str, Any]) -> None:
    """The end that the bias forces comes as soon as it is allowed, and not before."""
    output = outcome["min tokens"].outputs[0]
    assert len(output.token_ids) == 25
    assert list(output.token_ids).index(1) == 24
    assert output.finish_reason == "stop"


def test_logprobs(outcome: dict[str, Any]) -> None:
    output = outcome["logprobs"].outputs[0]
    for entry, token in zip(output.logprobs, output.token_ids, strict=True):
        assert len(entry) == 5
        assert entry[token].rank == 1
        assert entry[token].logprob == max(e.logprob for e in entry.values()) <= 0


def test_prompt_logprobs(outcome: dict[str, Any], jobs: dict[str, Job]) -> None:
    """One entry for each prompt token, also where a switch came between two chunks."""
    tokens, entries = (
        jobs["prompt logprobs"].prompt,
        outcome["prompt logprobs"].prompt_logprobs,
    )
    assert len(entries) == len(tokens) == 3 * CHUNK + 10
    for entry, token in zip(entries[1:], tokens[1:], strict=True):
        assert 3 <= len(entry) <= 4
        assert entry[token].logprob < 0
        assert sum(math.exp(e.logprob) for e in entry.values()) < 1 + TOLERANCE


def test_penalties_have_an_effect(outcome: dict[str, Any]) -> None:
    """Each gives another text than the same prompt without, with less repetition."""
    plain = outcome["plain"].outputs[0]
    distinct = len(set(plain.token_ids[:40]))
    for kind in ("presence", "frequency", "repetition"):
        output = outcome[f"{kind} penalty"].outputs[0]
        assert list(output.token_ids) != list(plain.token_ids[:40])
        assert len(set(output.token_ids)) >= distinct
    assert len(set(outcome["presence penalty"].outputs[0].token_ids)) > distinct


def test_token_restrictions(
    llm: Any, outcome: dict[str, Any], jobs: dict[str, Job], plain: Any
) -> None:
    assert set(outcome["allowed tokens"].outputs[0].token_ids) <= {50, 51, 52, 53}
    (bad,) = jobs["bad words"].sampling["bad_words"]
    assert bad in plain_words(llm, plain)
    assert bad not in plain_words(llm, outcome["bad words"].outputs[0])


def test_structured_outputs(outcome: dict[str, Any]) -> None:
    structured = outcome["JSON"].outputs[0]
    assert structured.finish_reason == "stop"
    value = json.loads(structured.text)
    assert value["river"] in ("Aare", "Rhine", "Danube")
    assert value["mood"] in ("calm", "wild")
    assert isinstance(value["long"], bool) and len(value) == 3
    regex = outcome["regex"].outputs[0]
    assert regex.finish_reason == "stop"
    assert re.fullmatch(r"(ab|cd){5}-[0-9]{6}", regex.text)


def test_several_samples(outcome: dict[str, Any]) -> None:
    """n=3 gives three different texts in order."""
    outputs = outcome["several samples"].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert {len(output.token_ids) for output in outputs} == {30}


def test_thinking_ends_with_one_whole_phrase(outcome: dict[str, Any]) -> None:
    """Also where a switch comes in the middle of the phrase that vLLM forces."""
    output = outcome["thinking"].outputs[0]
    assert output.text.count(STOP_THINKING) == 1
    assert output.text.count(STOP_THINKING[:5]) == 1


@pytest.mark.parametrize("place", [*PLACES, "adapter"])
def test_what_a_users_logits_processor_keeps(outcome: dict[str, Any], place: str) -> None:
    """It goes on with its count, wherever it keeps that."""
    assert_counted(list(outcome[f"counted in {place}"].outputs[0].token_ids))


# ---------------------------------------------------------------- unseeded sampling


@pytest.mark.parametrize("script", [{0: 1, 6: 2, 12: 1}, {0: 2, 6: 1, 12: 2}])
def test_unseeded_samples_differ_and_ranks_agree(llm: Any, script: Script) -> None:
    """Replicas draw differently, the ranks of a tensor-parallel group alike.

    Ranks that drew different tokens would go on from different contexts, and the log-probabilities
    of the group would no longer be those of the tokens that it returns.
    """
    text = prompt(20, 30)
    sampling = dict(max_tokens=20, temperature=1.0, logprobs=0, ignore_eos=True)
    many = run(llm, {"n": Job(text, {**sampling, "n": 8})}, script)["n"].outputs
    single = run(llm, {str(i): Job(text, sampling) for i in range(8)}, script)
    samples = [*many, *(output.outputs[0] for output in single.values())]
    assert len({tuple(sample.token_ids) for sample in samples}) == 16

    # The same tokens as a prompt, in the other layout.
    judge = {0: 2 if script[0] == 1 else 1}
    judged = run(
        llm,
        {
            str(i): Job([*text, *sample.token_ids], greedy(1, prompt_logprobs=0))
            for i, sample in enumerate(samples)
        },
        judge,
    )
    for i, sample in enumerate(samples):
        entries = judged[str(i)].prompt_logprobs[len(text) :]
        assert chosen(sample.logprobs, sample.token_ids) == pytest.approx(
            chosen(entries, sample.token_ids), abs=TOLERANCE
        )


# ---------------------------------------------------------------- streaming


def streamed(
    llm: Any, kind: str, jobs: dict[str, Job], script: Script, expected: dict[str, Any]
) -> dict[str, list[Any]]:
    """The pieces of each request, which come in order, once each, and add up to the whole."""
    from vllm.sampling_params import RequestOutputKind

    kinds = {"output_kind": RequestOutputKind[kind]}
    add(llm, {name: Job(job.prompt, job.sampling | kinds) for name, job in jobs.items()})
    pieces_of = {}
    for name, outputs in drive(llm, script).items():
        whole, pieces = expected[name].outputs[0], [output.outputs[0] for output in outputs]
        assert [output.finished for output in outputs] == [False] * (len(pieces) - 1) + [True]
        if kind == "DELTA":
            assert [t for piece in pieces for t in piece.token_ids] == list(whole.token_ids)
            assert "".join(piece.text for piece in pieces) == whole.text
        else:
            for shorter, longer in itertools.pairwise(pieces):
                assert longer.text.startswith(shorter.text)
            assert list(pieces[-1].token_ids) == list(whole.token_ids)
            assert pieces[-1].text == whole.text
        pieces_of[name] = pieces
    assert pieces_of.keys() == jobs.keys()
    return pieces_of


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_streaming(llm: Any, kind: str, runs: dict[str, dict[str, Any]], jobs: Any) -> None:
    """Pieces come step by step."""
    names = ["plain", "logprobs", "stop string", "seeded", "prompt logprobs"]
    subset, expected = {name: jobs[name] for name in names}, runs["tp=1"]
    assert pat_vllm.switch(llm, tp=1)
    pieces = streamed(llm, kind, subset, RUNS["switches from tp=1"], expected)
    for name in names:
        assert len(pieces[name]) >= len(expected[name].outputs[0].token_ids) > 10


# ---------------------------------------------------------------- aborts


def test_aborts(llm: Any, runs: dict[str, dict[str, Any]], jobs: dict[str, Job]) -> None:
    """Aborted before, between and after switches, running or waiting; the others go on."""
    assert pat_vllm.switch(llm, tp=1)
    # 2 x 16 requests run, the rest wait; after the switch 16 run. None ends by itself, however
    # many steps a replica makes while the other one makes its own.
    crowd = {f"crowd {i}": Job(prompt(100 + i, 25), greedy(300)) for i in range(36)}
    ids = add(llm, {"plain": jobs["plain"], "seeded": jobs["seeded"], **crowd})
    script = {5: 2, 11: 1}
    aborted = {
        2: ["crowd 0", "crowd 35"],  # before a switch; the second one waits
        5: ["crowd 1", "crowd 2"],  # right after one, before any step
        6: ["crowd 3"],
        10: ["crowd 4", "crowd 34"],  # just before the way back
        12: [f"crowd {i}" for i in range(5, 34)],
    }
    assert {name for names in aborted.values() for name in names} == set(crowd)

    def at_step(step: int) -> None:
        for name in aborted.get(step, ()):
            llm.llm_engine.abort_request([ids[name]], internal=True)

    done = drive(llm, script, at_step)

    finished = {name for name, outputs in done.items() if outputs[-1].finished}
    assert finished == {"plain", "seeded"}
    for name in finished:
        assert_same(done[name][-1], runs["tp=1"][name])


# ---------------------------------------------------------------- prefix caching


@pytest.mark.parametrize("tp", [1, 2])
def test_prefix_caching(llm: Any, tp: int) -> None:
    """Equal prompts meet in the replica that has their KV."""
    prompts = {"a": prompt(30, 200), "b": prompt(31, 200), "c": prompt(32, 200)}
    assert pat_vllm.switch(llm, tp=tp)
    # Keeps the engine busy: an idle one goes back. Where there are two replicas, that is here.
    add(llm, {"anchor": Job(prompt(33, 5), greedy(120))})
    add(llm, {name: Job(tokens, greedy(8)) for name, tokens in prompts.items()})

    def at_end(name: str) -> None:
        # By events: while one replica is slow, the other one makes any number of steps.
        if name in prompts:
            add(llm, {f"{name} again": Job(prompts[name], greedy(8))})

    done = drive(llm, at_first_output=at_end)
    for name in prompts:
        first, again = done[name][-1], done[f"{name} again"][-1]
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens == 192  # full blocks of 32
        assert_same(first, again)


def test_prefix_caching_across_a_switch(llm: Any) -> None:
    """KV that was carried serves later requests, and KV of the old layout is not mistaken."""
    tokens = prompt(32, 200)
    reference = run(llm, {"a": Job(tokens, greedy(40))}, {0: 1})["a"]
    # Live at the switch: carried. Afterwards the same prompt comes again.
    assert llm.reset_prefix_cache()
    late: dict[str, Job] = {"b": Job(tokens, greedy(40))}
    add(llm, {"a": Job(tokens, greedy(40))})

    done = drive(llm, {12: 2}, lambda step: add(llm, late) if step == 14 else None)
    assert done["a"][-1].num_cached_tokens == 0
    assert done["b"][-1].num_cached_tokens == 192
    # Nothing was live at this switch: what was cached is carried all the same.
    assert pat_vllm.switch(llm, tp=1)
    after = run(llm, {"c": Job(tokens, greedy(40))}, {0: 1})["c"]
    assert after.num_cached_tokens == 192
    for output in (done["a"][-1], done["b"][-1], after):
        assert output.outputs[0].token_ids == reference.outputs[0].token_ids


RESETS = {
    "right after a switch": ({0: 1, 7: 2}, [7]),
    "in mid-prefill": ({0: 1, 2: 2}, [2]),
    "several": ({0: 2, 4: 1, 8: 2, 20: 1}, [4, 5, 9, 19, 20]),
}


@pytest.mark.parametrize("case", RESETS)
def test_reset_prefix_cache_while_requests_run(
    llm: Any, case: str, runs: dict[str, dict[str, Any]], jobs: dict[str, Job]
) -> None:
    """Running requests are computed again: as after new weights, but here with the old ones."""
    script, resets = RESETS[case]
    names = ["plain", "seeded", "logprobs", "prompt logprobs", "seeded, all penalties", "long"]
    assert pat_vllm.switch(llm, tp=script[0])
    add(llm, {name: jobs[name] for name in names})

    def at_step(step: int) -> None:
        if step in resets:
            assert llm.reset_prefix_cache(reset_running_requests=True)

    done = drive(llm, script, at_step)
    for name in names:
        assert_same(done[name][-1], runs["tp=1"][name])


# ---------------------------------------------------------------- sleep


@pytest.mark.parametrize(("tp", "level"), [(1, 0), (2, 1)])
def test_sleep_and_wake_up(
    llm: Any, tp: int, level: int, runs: dict[str, dict[str, Any]], jobs: dict[str, Job]
) -> None:
    """Requests stay while the engine sleeps; new ones queue up.

    A switch is possible in between, unless the KV's memory is gone: then it is refused.
    """
    assert pat_vllm.switch(llm, tp=tp)
    add(llm, {"plain": jobs["plain"], "long": jobs["long"]})
    for _ in range(12):
        llm.llm_engine.step()

    llm.sleep(level=level, mode="keep")
    add(llm, {"seeded": jobs["seeded"]})
    assert pat_vllm.switch(llm, tp=3 - tp) == (level == 0)
    # Steps that were in flight may still hand out their tokens.
    llm.llm_engine.step()
    assert not any(llm.llm_engine.step() for _ in range(5))
    assert llm.llm_engine.is_sleeping()
    assert pat_vllm.report(llm).layout.tp == (3 - tp if level == 0 else tp)

    llm.wake_up(tags=["scheduling"] if level == 0 else None)
    assert not llm.llm_engine.is_sleeping()
    assert pat_vllm.switch(llm, tp=3 - tp)
    done = drive(llm)
    for name in ("plain", "long", "seeded"):
        assert_same(done[name][-1], runs["tp=1"][name])


def test_sleep_aborts_by_default(llm: Any) -> None:
    add(llm, {"a": Job(prompt(40, 20), greedy(50)), "b": Job(prompt(41, 20), greedy(50))})
    for _ in range(5):
        llm.llm_engine.step()
    llm.sleep(level=0)
    assert scheduler_of(llm).get_request_counts() == (0, 0)
    llm.wake_up(tags=["scheduling"])
    # In one process vLLM sends no outputs for these.
    llm.llm_engine.abort_request(["a", "b"])
    assert run(llm, {"c": Job(prompt(42, 20), greedy(5))}, {0: 2})["c"].finished


# ---------------------------------------------------------------- priorities


@pytest.mark.parametrize("switch_at", [6, 9])
def test_priorities(llm: Any, switch_at: int) -> None:
    """Urgent requests that come late overtake all that have not begun, in each layout.

    Not those that had run before a switch took their place away: they hold KV.
    """
    from vllm.sampling_params import RequestOutputKind

    def sampling(tokens: int) -> dict[str, Any]:
        return greedy(tokens, output_kind=RequestOutputKind.CUMULATIVE)

    # Of many lengths, so that places become free one by one; not before the urgent ones come.
    normal = {
        f"n{i}": Job(prompt(200 + i, 20), sampling(160 + 2 * i), priority=5) for i in range(44)
    }
    urgent = {f"u{i}": Job(prompt(300 + i, 20), sampling(5)) for i in range(4)}
    started: list[str] = []
    before: list[str] = []

    def at_step(step: int) -> None:
        if step == 8:
            # So far as many have run as two ranks hold, in two replicas or in one group.
            assert len(started) == 2 * MAX_NUM_SEQS
            before.extend(started)
            add(llm, urgent)
        if before and len(started) >= len(before) + len(urgent):
            assert pat_vllm.switch(llm, tp=1)

    add(llm, normal)
    done = drive(llm, {switch_at: 2}, at_step, started.append)
    assert set(done) == {*normal, *urgent}
    assert all(outputs[-1].finished for outputs in done.values())
    assert set(started[len(before) :][:4]) == set(urgent)


# ---------------------------------------------------------------- metrics


def metrics(llm: Any) -> dict[str, float]:
    """Counters, gauges, and sums and counts of histograms, over all labels."""
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if hasattr(metric, "value"):
            values[name] = values.get(name, 0) + metric.value
        elif hasattr(metric, "sum"):
            values[name + ":sum"] = values.get(name + ":sum", 0) + metric.sum
            values[name + ":count"] = values.get(name + ":count", 0) + metric.count
    return values


def test_metrics_are_those_of_one_engine(llm: Any) -> None:
    """Counters add up over replicas and switches; gauges show the whole engine at every step."""
    crowd = {f"r{i}": Job(prompt(400 + i, 20 + i), greedy(10 + i)) for i in range(36)}
    crowd["twice"] = crowd["again"] = Job(prompt(500, 70), greedy(12))
    script = {5: 2, 10: 1, 15: 2}
    before = metrics(llm)
    add(llm, crowd)

    tokens: dict[str, int] = {}
    gauges = []
    step = 1
    while llm.llm_engine.has_unfinished_requests():
        if step in script:
            assert pat_vllm.switch(llm, tp=script[step])
        for output in llm.llm_engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
        now = metrics(llm)
        gauges.append((now["num_requests_running"], now["num_requests_waiting"]))
        live = llm.llm_engine.get_num_unfinished_requests()
        assert sum(gauges[-1]) == live, step
        assert gauges[-1][0] <= MAX_NUM_SEQS * 2
        step += 1
    # As many as fit ran at some time, in two replicas or in one group, while others waited.
    assert max(running for running, _ in gauges) == MAX_NUM_SEQS * 2
    assert max(waiting for _, waiting in gauges) >= 38 - MAX_NUM_SEQS * 2 > 0
    assert gauges[-1] == (0, 0)

    after = metrics(llm)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    expected = sum(job.sampling["max_tokens"] for job in crowd.values())
    assert sum(tokens.values()) == expected == gained["generation_tokens"]
    assert gained["prompt_tokens"] == sum(len(job.prompt) for job in crowd.values())
    assert gained["request_success"] == len(crowd)
    assert gained["num_preemptions"] == 0
    assert gained["external_prefix_cache_queries"] == 0
    for name in (
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
    ):
        assert gained[f"{name}:count"] == len(crowd), name
        assert gained[f"{name}:sum"] >= 0, name
    total, queued = (
        gained["e2e_request_latency_seconds:sum"],
        gained["request_queue_time_seconds:sum"],
    )
    assert 0 < queued < total
