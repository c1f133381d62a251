"""The rollout actor without an engine, and the handle that the trainer has of it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="make test-openrlhf")


class Engine:
    """vLLM's, without a report of PAT."""

    def __init__(self, alive: bool = True) -> None:
        self._alive = alive
        self.params: list[Any] = []

    async def collective_rpc(self, method: str, args: tuple[float]) -> Any:
        raise RuntimeError("no report")

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if not self._alive:
            raise EngineDeadError()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.params.append(params)
        yield "the last output"


class Executor:
    """OpenRLHF's, which notes the tokenizers that it gets."""

    def __init__(self) -> None:
        self.tokenizers: list[Any] = []

    async def execute(self, hf_tokenizer: Any = None, **arguments: Any) -> str:
        self.tokenizers.append(hf_tokenizer)
        return "a response"


def actor_over(engine: Engine, executor: Any) -> Any:
    from pat_openrlhf.engines import PatRolloutActor

    actor: Any = object.__new__(PatRolloutActor)
    actor.llm, actor.executor = engine, executor
    actor._running = actor._rollouts = 0
    actor._tokenizer = None
    return actor


@pytest.mark.parametrize("alive", [True, False])
def test_only_a_dead_engine_fails_for_lack_of_a_report(alive: bool) -> None:
    actor = actor_over(Engine(alive), Executor())
    rollout = actor.generate_responses("a prompt", "a label", None, 8, None, num_samples=2)
    if alive:
        assert asyncio.run(rollout) == ["a response"] * 2
    else:
        with pytest.raises(RuntimeError, match="the PAT engine died during a rollout"):
            asyncio.run(rollout)


def test_vllm_is_asked_for_the_last_output_alone() -> None:
    """What OpenRLHF's loop over outputs then returns is the same; the caller's parameters stay."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = Engine()
    actor = actor_over(engine, Executor())
    given = SamplingParams(max_tokens=7, logprobs=1)
    assert asyncio.run(actor.generate([1, 2], given, multi_modal_data=None)) == "the last output"
    (params,) = engine.params
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    assert (params.max_tokens, params.logprobs) == (7, 1)
    assert given.output_kind == RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize("stop", [None, "end"])
@pytest.mark.parametrize("kind", ["single turns", "a reward of its own", "agents", "its own"])
def test_text_is_made_where_somebody_may_read_it(kind: str, stop: str | None) -> None:
    """OpenRLHF's executor for single turns reads none; stop strings are sought in it."""
    from openrlhf.utils.agent import MultiTurnAgentExecutor, SingleTurnAgentExecutor
    from vllm import SamplingParams

    class Rewarding(SingleTurnAgentExecutor):  # type: ignore[misc]
        async def _fetch_rewards_via_func(self, *args: Any) -> Any:
            raise NotImplementedError

    class Reading(SingleTurnAgentExecutor):  # type: ignore[misc]
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    executors: dict[str, Any] = {
        "single turns": SingleTurnAgentExecutor,
        "a reward of its own": Rewarding,
        "agents": MultiTurnAgentExecutor,
        "its own": Reading,
    }
    engine = Engine()
    actor = actor_over(engine, object.__new__(executors[kind]))
    given = SamplingParams(stop=stop)
    asyncio.run(actor.generate([1, 2], given))
    (params,) = engine.params
    assert params.detokenize == (stop is not None or kind in ("agents", "its own"))
    params._verify_args()
    assert given.detokenize


class Reference:
    """To a tokenizer in Ray's object store."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.unpacked = 0

    def hex(self) -> str:
        return str(id(self))

    def __await__(self) -> Generator[Any, None, Any]:
        self.unpacked += 1
        yield from asyncio.sleep(0.01).__await__()
        return self.tokenizer


def test_a_tokenizer_is_sent_and_unpacked_once() -> None:
    from pat_openrlhf.handle import TokenizerAtHand

    executor = Executor()
    actor = actor_over(Engine(), executor)
    references = [Reference("one"), Reference("another")]

    async def rollouts() -> None:
        for reference in references:
            calls = [
                actor.generate_responses(
                    prompt="p",
                    label="l",
                    hf_tokenizer=TokenizerAtHand(reference),
                    sampling_params=None,
                    max_length=8,
                )
                for _ in range(3)
            ]
            await asyncio.gather(*calls)

    asyncio.run(rollouts())
    assert executor.tokenizers == ["one"] * 3 + ["another"] * 3
    assert [reference.unpacked for reference in references] == [1, 1]


def test_each_engine_keeps_what_it_learns_in_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pat_openrlhf import engines
    from pat_openrlhf.options import EngineOptions

    started: list[dict[str, Any]] = []

    def start(**arguments: Any) -> Any:
        started.append(arguments["pat"])
        return SimpleNamespace(ready=SimpleNamespace(remote=lambda: None))

    actor_class = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=start))
    ray = SimpleNamespace(remote=lambda cls: actor_class, get=lambda references: None)
    monkeypatch.setattr(engines, "ray", ray)
    monkeypatch.setattr(engines, "check_nodes", lambda group, bundles: None)
    monkeypatch.setattr(engines, "get_bundle_indices", lambda group, index, ranks: [index])
    placed = {"scheduling_strategy": SimpleNamespace(placement_group=None)}
    policy = {"kind": "predictor", "profile": "/p.json"}
    options = EngineOptions({"policy": policy, "state_dir": "/kept"}, num_engines=2)
    of_all = engines.PatEngines(options)
    for _ in range(2):
        of_all.options(**placed).remote(tensor_parallel_size=2)
    assert started == [
        {"policy": policy, "state_dir": f"/kept/engine-{number}"} for number in range(2)
    ]


def test_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends each tokenizer once, and is its actor's otherwise."""
    from pat_openrlhf import handle

    sent: list[dict[str, Any]] = []

    def generate(**call: Any) -> int:
        sent.append(call)
        return len(sent)

    responses = SimpleNamespace(remote=generate)
    monkeypatch.setattr(handle.ray, "put", Reference)
    actor = SimpleNamespace(generate_responses=responses, wake_up="wake_up")
    engine: Any = handle.EngineHandle(actor)
    first, second = ["one"], ["other"]
    for prompt in "ab":
        engine.generate_responses.remote(prompt=prompt, hf_tokenizer=first)
    assert engine.generate_responses.remote(prompt="c", hf_tokenizer=second) == 3
    tokenizers = [call["hf_tokenizer"] for call in sent]
    assert tokenizers[0] is tokenizers[1] and tokenizers[0].reference.tokenizer is first
    assert tokenizers[2].reference.tokenizer is second
    assert [call["prompt"] for call in sent] == ["a", "b", "c"]

    assert engine.wake_up == "wake_up"
    with pytest.raises(AttributeError):
        _ = engine.pat_report
    engine._actor = "an actor's handle"
    engine._sent = "what Ray's processes do not share"
    copied = pickle.loads(pickle.dumps(engine))
    assert (copied._actor, copied._sent) == ("an actor's handle", None)
