"""PAT with vLLM's Model Runner V2, CUDA's default, on CPU.

V2 needs Triton, here its interpreter, and vLLM decides at import whether there is one. So the
engines run in a process of their own (`python -m tests.test_v2_runner OUT RUN...`), which writes
down what came back, run by run. Each test waits for the runs that it compares. What is generated
across switches must be what one layout generates, log-probabilities to 1e-4.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engines import engine
from tests.support.child import Child

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
SUPPORT = Path(__file__).parent / "support" / "v2_on_cpu"
CHUNK = 48
"""Tokens of a step, one and a half blocks: a longer prompt takes several steps."""
STOP = 77
MIN_TOKENS = 10

SWITCHES: dict[str, dict[int, int]] = {
    "static tp=1": {0: 1},
    "static tp=2": {0: 2},
    # The first steps of one tp=2 group are always the same; two replicas may take turns.
    "while prefilling": {0: 2, 1: 1, 4: 2, 6: 1},
    "while decoding": {0: 2, 12: 1, 18: 2, 23: 1},
    "all the time": {0: 1} | {step: 1 + step // 2 % 2 for step in range(2, 24, 2)},
    "now and then": {0: 2, 1: 1, 4: 2, 13: 1, 19: 2},
}
"""Runs of the batch: engine step -> tp."""

RUNS = {
    "migrate": tuple(SWITCHES)[:-1],
    "async, migrate": ("now and then",),
    "async, recompute": ("now and then",),
}
"""Runs by way of scheduling and what becomes of KV."""
CASES = [(kind, run) for kind, runs in RUNS.items() for run in runs]
NIGHTLY = "all the time"


def but_nightly(cases: Sequence[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: kinds and runs, or runs."""
    marks = [[pytest.mark.nightly] if NIGHTLY in case else [] for case in cases]
    split = [(case,) if isinstance(case, str) else case for case in cases]
    return [pytest.param(*case, marks=mark) for case, mark in zip(split, marks, strict=True)]


def requests() -> dict[str, tuple[list[int], dict[str, Any]]]:
    """The batch: prompt token ids and sampling parameters of each request."""
    rng = random.Random(5)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(100, 400) for _ in range(length)]

    greedy = {"temperature": 0.0, "max_tokens": 18, "ignore_eos": True, "logprobs": 1}
    seeded = greedy | {"temperature": 0.9, "seed": 11}
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.7}
    same_prompt = prompt(5)
    return {
        "prompt_logprobs": (prompt(2 * CHUNK + 5), greedy | {"prompt_logprobs": 1}),
        "aborted": (prompt(10), greedy | {"max_tokens": 200}),
        "allowed": (prompt(2 * CHUNK), seeded | {"allowed_token_ids": list(range(40, 60))}),
        "greedy": (prompt(20), greedy),
        # The interpreter cannot run vLLM's kernel for top-k and top-p.
        "min_p": (prompt(7), seeded | {"min_p": 0.02}),
        "penalties": (prompt(9), greedy | penalties),
        # The stop token is wanted from the first step on.
        "min_tokens": (
            prompt(6),
            greedy | {"min_tokens": MIN_TOKENS, "stop_token_ids": [STOP], "logit_bias": {STOP: 90}},
        ),
        "unseeded": (same_prompt, greedy | {"temperature": 1.0}),
        "unseeded again": (same_prompt, greedy | {"temperature": 1.0}),
        "long, aborted": (prompt(4 * CHUNK), greedy),
    }


UNSEEDED = {"unseeded", "unseeded again"}
ABORTS = {"aborted": 12, "long, aborted": 8}
"""Engine step before which a request is aborted."""


# ---------------------------------------------------------------- in the process of the engines


def main(out: str, *wanted: str) -> None:
    """Run the cases of the runs that are wanted.

    Outcomes and switches are appended to the file `out`, a line for each run.
    """

    def done(kind: str, run: str, result: Any) -> None:
        print(f"V2, {kind}, {run}: done", flush=True)
        with open(out, "a") as file:
            file.write(json.dumps([kind, run, result]) + "\n")

    print("V2, migrate: the engine starts", flush=True)
    with start_engine("migrate") as llm:
        made: dict[str, Any] = {}
        for run in [run for run in RUNS["migrate"] if run in wanted]:
            made[run] = generate(llm, SWITCHES[run])
            done("migrate", run, made[run])
        for run in made:
            done("scores", run, score(llm, run, made[run]["outcomes"]))
    print("V2, async: the engine starts", flush=True)
    restore = schedule_asynchronously()
    with start_engine("recompute") as llm:
        restore()
        for kind in ("async, recompute", "async, migrate"):
            # Starting an engine with the other option would take longer than the run.
            scheduler_of(llm).controller.costs.mode = kind.removeprefix("async, ")
            for run in [run for run in RUNS[kind] if run in wanted]:
                done(kind, run, generate(llm, SWITCHES[run]))


def start_engine(kv_transfer: str) -> AbstractContextManager[Any]:
    """A small engine of two ranks."""
    return engine(
        "qwen3",
        2,
        {"kv_transfer": kv_transfer},
        max_model_len=256,
        max_num_seqs=10,
        max_num_batched_tokens=CHUNK,
    )


def scheduler_of(llm: Any) -> Any:
    """The engine's `PATScheduler`; the engine core is in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def schedule_asynchronously() -> Callable[[], None]:
    """Let the next engine schedule asynchronously, as on CUDA, which vLLM turns off on CPU.

    Returns:
        Undoes it.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)

    def restore() -> None:
        CpuPlatform.check_and_update_config = original

    return restore


def generate(llm: Any, switches: Mapping[int, int]) -> dict[str, Any]:
    """Run the batch, switching to `switches[i]` before engine step i."""
    from vllm import SamplingParams

    import pat_vllm

    core = llm.llm_engine
    before = len(pat_vllm.report(llm).switches)
    for name, (prompt, sampling) in requests().items():
        core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**sampling))
    outcomes = {}
    step = 0
    while core.has_unfinished_requests():
        for name, at in ABORTS.items():
            if at == step:
                core.abort_request([name])
        if step in switches:
            assert pat_vllm.switch(llm, tp=switches[step])
            # Like schedulers with many steps behind them; each has fewer than the one before it.
            for replica in scheduler_of(llm).replica_set.replicas:
                replica.scheduler.current_step = 100_000 * (100 - step)
        for output in core.step():
            if output.finished and output.request_id not in ABORTS:
                outcomes[output.request_id] = outcome(output)
        step += 1
        # Many: while one replica is idle, a step need not wait for the other.
        assert step < 50_000, "the engine makes no progress"
    made = pat_vllm.report(llm).switches[before:]
    return {
        "asynchronous": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "v2": llm.llm_engine.vllm_config.use_v2_model_runner,
        "outcomes": outcomes,
        "switches": [[s.num_seqs, s.migrated, s.recomputed] for s in made if s.reason == "forced"],
    }


def outcome(output: Any) -> dict[str, Any]:
    """What came back for a request, fit for JSON."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            [one[token].logprob, *sorted(top.logprob for top in one.values())]
            for one, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ],
        "prompt_logprobs": [
            sorted(top.logprob for top in one.values())
            for one in output.prompt_logprobs or []
            if one
        ],
        "finish_reason": completion.finish_reason,
    }


def score(llm: Any, run: str, outcomes: Mapping[str, Any]) -> dict[str, list[float]]:
    """Log-probabilities of a run's generated tokens as prompts of the engine's home layout.

    Of all requests of a run in one layout; of the unseeded ones of every run, as the others
    generate the same in each.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    names = [name for name in outcomes if name in UNSEEDED or run == "static tp=2"]
    prompts = [requests()[name][0] for name in names]
    sequences = [p + outcomes[n]["tokens"] for n, p in zip(names, prompts, strict=True)]
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for tokens in sequences], params, use_tqdm=False
    )
    scores = {}
    for name, prompt, tokens, output in zip(names, prompts, sequences, outputs, strict=True):
        generated = list(zip(output.prompt_logprobs, tokens, strict=True))[len(prompt) :]
        scores[name] = [one[token].logprob for one, token in generated]
    return scores


# ---------------------------------------------------------------- in the process of the tests


class Results:
    """What the child has written down, and will."""

    def __init__(self, child: Child, out: Path) -> None:
        self._child = child
        self._out = out

    def made(self) -> dict[tuple[str, str], Any]:
        """By kind and run, as far as they are done."""
        lines = self._out.read_text().split("\n")[:-1] if self._out.exists() else []
        return {(kind, run): result for kind, run, result in map(json.loads, lines)}

    def of(self, kind: str, run: str) -> Any:
        """A run's result, which may be still to come."""
        self._child.wait_for(lambda: (kind, run) in self.made(), f"{kind}, {run}")
        return self.made()[kind, run]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """What the engines generate, in a process that works on while tests look at what is done."""
    folder = tmp_path_factory.mktemp("v2")
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(root), os.environ.get("PYTHONPATH", "")]),
    }
    out = folder / "results.jsonl"
    mine = [item for item in request.session.items if item.path == request.path]
    nightly = any(item.get_closest_marker("nightly") for item in mine)
    wanted = [run for run in SWITCHES if nightly or run != NIGHTLY]
    command = [sys.executable, "-m", "tests.test_v2_runner", str(out), *wanted]
    child = Child(command, folder / "log", cwd=root, env=environment)
    found = Results(child, out)
    try:
        yield found
        if found.made().keys() >= {(kind, run) for kind, run in CASES if run in wanted}:
            assert child.wait() == 0, child.tail()
    finally:
        child.kill()


@pytest.mark.parametrize("kind, run", but_nightly(CASES))
def test_outputs_are_those_of_one_layout(results, kind, run):
    expected = results.of("migrate", "static tp=1")["outcomes"]
    made = results.of(kind, run)
    assert made["v2"]
    assert made["asynchronous"] == kind.startswith("async")
    assert made["outcomes"].keys() == expected.keys() == requests().keys() - ABORTS.keys()
    for request, outcome in made["outcomes"].items():
        static = expected[request]
        assert outcome["prompt_logprobs"] == close(static["prompt_logprobs"]), request
        assert len(outcome["tokens"]) == len(static["tokens"]), request
        if request not in UNSEEDED:
            assert outcome["tokens"] == static["tokens"], request
            assert outcome["logprobs"] == close(static["logprobs"]), request
            assert outcome["finish_reason"] == static["finish_reason"], request


@pytest.mark.parametrize("run", but_nightly(RUNS["migrate"]))
def test_teacher_forced_log_probabilities(results, run):
    """Also of unseeded requests: ranks that drew different tokens would not compute the same."""
    outcomes = results.of("migrate", run)["outcomes"]
    found = results.of("scores", run)
    assert found.keys() >= UNSEEDED
    for request, scores in found.items():
        sampled = [one[0] for one in outcomes[request]["logprobs"]]
        assert sampled == pytest.approx(scores, abs=TOLERANCE), request


def test_the_batch_asks_for_what_it_should(results):
    static = results.of("migrate", "static tp=1")["outcomes"]
    assert static["min_tokens"]["finish_reason"] == "stop"
    assert len(static["min_tokens"]["tokens"]) == MIN_TOKENS + 1
    assert STOP not in static["min_tokens"]["tokens"][:-1]
    assert set(static["allowed"]["tokens"]) <= set(range(40, 60))
    assert len(set(static["penalties"]["tokens"])) > 12
    prompt, _ = requests()["prompt_logprobs"]
    assert len(static["prompt_logprobs"]["prompt_logprobs"]) == len(prompt) - 1
    for run in set(RUNS["migrate"]) - {NIGHTLY}:
        outcomes = results.of("migrate", run)["outcomes"]
        same_prompt = [outcomes[name]["tokens"] for name in sorted(UNSEEDED)]
        assert same_prompt[0] != same_prompt[1]


@pytest.mark.parametrize(
    "kind, run", but_nightly([case for case in CASES if "static" not in case[1]])
)
def test_requests_were_carried_as_asked_for(results, kind, run):
    switches = results.of(kind, run)["switches"]
    migrated = sum(one for _, one, _ in switches)
    recomputed = sum(one for _, _, one in switches)
    if kind.endswith("recompute"):
        assert recomputed > 5
        assert migrated == 0
    else:
        assert migrated > 1
    if run == "while prefilling":
        assert switches[0][1:] == [0, 0], "a switch before the first step carries no KV"
        assert switches[1][1:] == [0, 1], "a half-computed prompt with logprobs has to recompute"


def close(values: list[list[float]]) -> Any:
    """Compares equal to lists of log-probabilities within the tolerance."""
    return [pytest.approx(one, abs=TOLERANCE) for one in values]


if __name__ == "__main__":
    main(*sys.argv[1:])
