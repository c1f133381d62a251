"""Mistakes in handing requests from layout to layout, each of which a tour must see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.mutation import mutated
from tests.v2.in_workers import find, make_mistake, undo_mistakes

SWITCH = "pat_vllm.worker.worker:PATWorkerMixin.pat_switch"


@dataclass(frozen=True)
class Mistake:
    """What replaces what in a function's source.

    Attributes:
        in_workers: or else in the engine core, which is in this process.
        way_of_kv: how the tour carries KV.
        nightly: not for every change.
    """

    function: str
    changes: dict[str, str]
    in_workers: bool = True
    way_of_kv: str = "migrate"
    nightly: bool = False


MISTAKES = {
    "KV stays where it was": Mistake(
        SWITCH, {"self._move_kv(source, target, command.moves)": "pass"}, nightly=True
    ),
    "KV comes to other rows of the block table": Mistake(
        "pat_vllm.kv_transfer.connector:PATConnector.update_state_after_alloc",
        {"tuple(block_ids[:num_blocks])": "tuple(reversed(block_ids[:num_blocks]))"},
        in_workers=False,
    ),
    "tokens left behind count as computed": Mistake(
        "pat_vllm.scheduler.switch:_rewind",
        {
            "request.num_computed_tokens = 0": "request.num_computed_tokens = "
            "0 if one.migrates else max(0, one.computed - 1)"
        },
        in_workers=False,
        way_of_kv="recompute",
    ),
    "the step in flight hands out the token before": Mistake(
        "pat_vllm.scheduler.replica_set:ReplicaSet.drain",
        {
            "self.finish(self.executor.finished(wait_for_all=True))": """\
results = self.executor.finished(wait_for_all=True)
    for one in results:
        requests = self.replicas[one.replica].scheduler.requests
        for name, tokens in zip(one.output.req_ids, one.output.sampled_token_ids, strict=True):
            tokens[:] = [requests[name].all_token_ids[-1] for _ in tokens if name in requests]
    self.finish(results)"""
        },
        in_workers=False,
    ),
    "weights of the layout before": Mistake(
        SWITCH,
        {"weight_bytes = self._weights.arrange(target.layout)": "weight_bytes = 0"},
        nightly=True,
    ),
    "ranks of a replica draw different numbers": Mistake(
        SWITCH, {"command.target.replica_of(self.rank)": "self.rank"}
    ),
    "the runner that is left keeps its requests": Mistake(
        SWITCH, {"self._handover.clear(source.runner)": "pass"}, nightly=True
    ),
    # Of vLLM's, on which it rests that PAT hands over no counters.
    "penalties do not count what was generated before": Mistake(
        "vllm.v1.worker.gpu.sample.penalties:PenaltiesState.add_request",
        {
            "self._new_penalties_reqs.append(req_idx)": """\
if self.req_states.prefill_len.np[req_idx] == self.req_states.prompt_len.np[req_idx]:
            self._new_penalties_reqs.append(req_idx)"""
        },
    ),
}


@contextmanager
def made(llm: Any, mistake: Mistake) -> Iterator[None]:
    """Inside, the engine makes a mistake."""
    if not mistake.in_workers:
        with mutated(find(mistake.function), mistake.changes):
            yield
        return
    try:
        llm.collective_rpc(make_mistake, args=(mistake.function, mistake.changes))
        yield
    finally:
        llm.collective_rpc(undo_mistakes)
