"""The rollout actor without an engine, and the handle that the trainer has of it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="make test-openrlhf")


@pytest.mark.parametrize("alive", [True, False])
def test_only_a_dead_engine_fails_for_lack_of_a_report(alive: bool) -> None:
    from pat_openrlhf.engines import PatRolloutActor
    from vllm.v1.engine.exceptions import EngineDeadError

    class Engine:
        async def collective_rpc(self, method: str, args: tuple[float]) -> Any:
            raise EngineDeadError()

        async def check_health(self) -> None:
            if not alive:
                raise EngineDeadError()

    class Executor:
        async def execute(self, **arguments: Any) -> str:
            return "a response"

    actor: Any = object.__new__(PatRolloutActor)
    actor.llm, actor.executor = Engine(), Executor()
    actor._running = actor._rollouts = 0
    rollout = actor.generate_responses("a prompt", "a label", None, 8, None, num_samples=2)
    if alive:
        assert asyncio.run(rollout) == ["a response"] * 2
    else:
        with pytest.raises(RuntimeError, match="the PAT engine died during a rollout"):
            asyncio.run(rollout)


def test_vllm_is_asked_for_the_last_output_alone() -> None:
    """What OpenRLHF's loop over outputs then returns is the same; the caller's parameters stay."""
    from pat_openrlhf.engines import PatRolloutActor
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = []

    class Engine:
        async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
            asked.append(params)
            yield "the last output"

    actor: Any = object.__new__(PatRolloutActor)
    actor.llm = Engine()
    given = SamplingParams(max_tokens=7, logprobs=1)
    assert asyncio.run(actor.generate([1, 2], given, multi_modal_data=None)) == "the last output"
    (params,) = asked
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    assert (params.max_tokens, params.logprobs) == (7, 1)
    assert given.output_kind == RequestOutputKind.CUMULATIVE


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


class Call:
    """An actor's method: notes its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def remote(self, **arguments: Any) -> int:
        self.calls.append(arguments)
        return len(self.calls)


def handle(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Call]:
    from pat_openrlhf import handle as module

    monkeypatch.setattr(module.ray, "put", Reference)
    responses = Call()
    actor = SimpleNamespace(generate_responses=responses, wake_up="wake_up")
    return module.EngineHandle(actor), responses


def test_a_tokenizer_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, responses = handle(monkeypatch)
    one, other = ["one"], ["other"]
    for prompt in "ab":
        engine.generate_responses.remote(prompt=prompt, hf_tokenizer=one)
    assert engine.generate_responses.remote(prompt="c", hf_tokenizer=other) == 3
    sent = [call["hf_tokenizer"] for call in responses.calls]
    assert sent[0] is sent[1] and sent[0].reference.tokenizer is one
    assert sent[2].reference.tokenizer is other
    assert [call["prompt"] for call in responses.calls] == ["a", "b", "c"]


def test_a_handle_is_its_actors_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = handle(monkeypatch)
    assert engine.wake_up == "wake_up"
    with pytest.raises(AttributeError):
        _ = engine.pat_report
    engine._actor = "an actor's handle"
    engine._sent = "what Ray's processes do not share"
    copied = pickle.loads(pickle.dumps(engine))
    assert (copied._actor, copied._sent) == ("an actor's handle", None)


def test_a_tokenizer_is_unpacked_once() -> None:
    from pat_openrlhf.engines import PatRolloutActor
    from pat_openrlhf.handle import TokenizerAtHand

    used = []

    class Engine:
        async def collective_rpc(self, method: str, args: tuple[float]) -> Any:
            raise RuntimeError("no report")

        async def check_health(self) -> None:
            pass

    class Executor:
        async def execute(self, hf_tokenizer: Any, **arguments: Any) -> str:
            used.append(hf_tokenizer)
            return "a response"

    actor: Any = object.__new__(PatRolloutActor)
    actor.llm, actor.executor = Engine(), Executor()
    actor._running = actor._rollouts = 0
    actor._tokenizer = None
    references = [Reference("one"), Reference("another")]

    async def rollout(reference: Reference) -> None:
        arguments = {"sampling_params": None, "max_length": 8}
        calls = [
            actor.generate_responses(
                prompt="p", label="l", hf_tokenizer=TokenizerAtHand(reference), **arguments
            )
            for _ in range(3)
        ]
        await asyncio.gather(*calls)

    async def rollouts() -> None:
        for reference in references:
            await rollout(reference)

    asyncio.run(rollouts())
    assert used == ["one"] * 3 + ["another"] * 3
    assert [reference.unpacked for reference in references] == [1, 1]
