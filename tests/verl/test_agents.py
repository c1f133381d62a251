"""verl's tool agent loop over a PAT engine: each turn finds its KV, whatever the layout became.

A rollout's trajectories have three turns, with a calculator between. The engine switches between
all turns and within each. What the agent loop hands to the trainer is compared with what
transformers computes from the weights that were pushed last.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("verl")

import numpy as np

from tests.verl.environment import ROOT
from tests.verl.models import few_tokens
from tests.verl.reference import Reference
from tests.verl.servers import Server, server

BLOCK = 32
CLOSE = 1e-4
"""float32: sums in another order. Stock vLLM's worst of 15,360 tokens of this class: 1.7e-5.

With KV of one token from the weights before, half of the tokens are off by more than 0.3.
"""
QUESTIONS = [f"{n} plus {3 * n} is what, and times three?" for n in (17, 28, 39, 41, 52, 64)]
"""Longer than a block, in which they differ: no first turn finds another's prefix."""
TURNS = 3
LENGTHS = [16 + 20 * place for place in range(len(QUESTIONS))]
"""Tokens of a response, by its place in the batch."""
AGENTS = {
    "agent.default_agent_loop": "tool_agent",
    "multi_turn.format": "random_model",
    "multi_turn.function_tool_path": ROOT / "integrations" / "verl" / "examples" / "calculator.py",
    "multi_turn.max_assistant_turns": TURNS,
    "temperature": 0.0,
    "response_length": 448,
}


@pytest.fixture(scope="module")
def pat() -> Iterator[Server]:
    size = f"engine_kwargs.vllm.block_size={BLOCK}"
    # Tiny models' prefixes are computed again as fast as they are moved.
    options = "engine_kwargs.vllm.additional_config.pat={kv_transfer:migrate,policy:{kind:static}}"
    with server(few_tokens("llama"), size, options, **AGENTS) as running:
        yield running


@dataclass(frozen=True)
class Request:
    """A turn of a trajectory: how long its prompt and its response are, and what was cached."""

    prompt: int
    response: int
    cached: int


class Switching:
    """verl's client, which makes all trajectories take their turns together, and switches then.

    A turn begins in the layout `first`, where all trajectories have waited for it. As soon as a
    response has ended the engine switches to the other one, in which the turn ends.
    """

    def __init__(self, pat: Server, first: int) -> None:
        self._pat = pat
        self._client = pat.manager.get_client()
        self._first = first
        self._together = asyncio.Barrier(len(QUESTIONS))
        self._running = 0
        self.requests: dict[str, list[Request]] = defaultdict(list)

    async def generate(self, request_id: str, **arguments: Any) -> Any:
        place = await self._together.wait()
        if place == 0:
            await self._pat.actor.pat_switch.remote(self._first)
        await self._together.wait()
        self._running += 1
        sampling = {**arguments.pop("sampling_params"), "ignore_eos": True}
        output = await self._client.generate(
            request_id, sampling_params=sampling | {"max_tokens": LENGTHS[place]}, **arguments
        )
        cached = output.extra_fields["num_cached_tokens"]
        turn = Request(len(arguments["prompt_ids"]), len(output.token_ids), cached)
        self.requests[request_id].append(turn)
        if self._running == len(QUESTIONS):
            await self._pat.actor.pat_switch.remote(3 - self._first)
        self._running -= 1
        return output


def rollout(pat: Server, first: int) -> tuple[Any, list[list[Request]]]:
    """A batch by verl's agent loop: what the trainer gets of it, and the turns of trajectories."""
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    asked = np.empty(len(QUESTIONS), dtype=object)
    asked[:] = [[{"role": "user", "content": question}] for question in QUESTIONS]
    batch = DataProto.from_dict(non_tensors={"raw_prompt": asked})

    async def generate() -> tuple[Any, list[list[Request]]]:
        client: Any = Switching(pat, first)
        worker = AgentLoopWorker(pat.config, client)
        return await worker.generate_sequences(batch), list(client.requests.values())

    result: tuple[Any, list[list[Request]]] = pat.do(generate())
    return result


def check_tokens(reference: Reference, batch: Any) -> None:
    """The trainer's tokens and log-probabilities are this model's, greedily sampled."""
    for index in range(len(QUESTIONS)):
        row = {name: batch.batch[name][index] for name in batch.batch.keys()}  # noqa: SIM118
        width = len(row["prompts"])
        prompt = row["prompts"][row["attention_mask"][:width].bool()].tolist()
        length = int(row["attention_mask"][width:].sum())
        table = reference.logprobs(prompt, row["responses"][:length].tolist())
        sampled = row["response_mask"][:length].bool()
        logprobs = row["rollout_log_probs"][:length]
        expected = table.gather(-1, row["responses"][:length, None])[:, 0]
        assert (expected - logprobs)[sampled].abs().max() < CLOSE
        assert (table.max(-1).values - logprobs)[sampled].max() < 2 * CLOSE
        assert not logprobs[~sampled].any()  # what the calculator said


def check_turns(batch: Any, trajectories: list[list[Request]]) -> None:
    """Each turn but the first found all whole blocks of the turn before it."""
    assert len(trajectories) == len(QUESTIONS)
    # verl also counts the question and the calculator's answers.
    assert list(batch.non_tensor_batch["__num_turns__"]) == [2 * TURNS] * len(QUESTIONS)
    for turns in trajectories:
        assert len(turns) == TURNS
        assert turns[0].prompt > BLOCK and turns[0].cached == 0
        for turn, before in zip(turns[1:], turns, strict=False):
            held = before.prompt + before.response
            assert turn.prompt > held  # an answer of the calculator follows
            # The KV of a last token is never computed.
            assert turn.cached == (held - 1) // BLOCK * BLOCK


def check_report(report: Any, since: float) -> float:
    """Switches between turns carried caches alone, those within turns also requests.

    Returns:
        When the last one was made.
    """
    switches = [switch for switch in report.switches if switch.at > since]
    within = [switch for switch in switches if switch.num_seqs]
    between = [switch for switch in switches if not switch.num_seqs and switch.cached_tokens]
    assert len(within) == TURNS and all(switch.migrated and switch.kv_bytes for switch in within)
    assert len(between) >= TURNS - 1
    return float(switches[-1].at)


def test_turns_find_their_kv_and_weights_end_it(pat: Server) -> None:
    at = 0.0
    for step, first in enumerate((1, 2)):
        if step:  # the same questions again: first turns find nothing of the weights before
            pat.do(pat.push(few_tokens("llama", step), step=step))
        batch, trajectories = rollout(pat, first)
        check_turns(batch, trajectories)
        check_tokens(Reference(few_tokens("llama", step)), batch)
        at = check_report(pat.call("pat_report"), at)
