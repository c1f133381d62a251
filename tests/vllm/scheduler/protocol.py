"""Workers that play what real ones do with drafts, so that a storm takes no engine.

Their model's text is known beforehand: each request has its own, which repeats itself.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from pat_vllm.executor import executor as executor_module
from pat_vllm.executor.executor import StepResult
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.start.setup import Setup
from tests.support.ngram import propose
from tests.vllm.without_workers import Executor, engine_config, request

PROMPT = 32
SHORTEST, LONGEST = 2, 4
MOST = 4
LENGTHS = (0, 1, 2, MOST)
"""Draft lengths that an engine with `SPECULATIVE` keeps ready."""
SPECULATIVE: dict[str, Any] = {
    "method": "ngram",
    "prompt_lookup_min": SHORTEST,
    "prompt_lookup_max": LONGEST,
    "num_speculative_tokens": MOST,
}


class Workers(Executor):
    """Runs steps when it is asked for their results, and checks what it is told.

    Attributes:
        k: the draft length of steps.
        tokens: of each request, its prompt first.
        drafted: draft tokens that were verified.
        accepted: those that were right.
        lengths: steps by their draft length.
    """

    def __init__(self) -> None:
        self.k = MOST
        self.tokens: dict[str, list[int]] = {}
        self.drafted = self.accepted = 0
        self.lengths: Counter[int] = Counter()
        self._drafts: dict[str, list[int]] = {}
        self._pending: dict[int, deque[Any]] = {}

    def start(self, step: Any) -> None:
        """Take the steps of replicas."""
        for replica, output in step.steps.items():
            self._pending.setdefault(replica, deque()).append(output)
            if output.total_num_scheduled_tokens:
                assert output.num_spec_tokens_to_schedule == self.k, f"replica {replica}"
                self.lengths[self.k] += 1

    def finished(self, wait_for_all: bool = False, some: random.Random | None = None) -> list[Any]:
        """The results of all steps, or, without `wait_for_all`, of those of some replicas."""
        replicas = [replica for replica, steps in self._pending.items() if steps]
        if not wait_for_all and some is not None and replicas:
            replicas = some.sample(replicas, some.randint(1, len(replicas)))
        return [
            self._run(replica, self._pending[replica].popleft())
            for replica in replicas
            for _ in range(len(self._pending[replica]))
        ]

    def switch(self, command: Any) -> list[Any]:
        """No step is in flight."""
        assert not any(self._pending.values())
        return super().switch(command)

    def _run(self, replica: int, step: Any) -> StepResult:
        cached = step.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id}: is known, and not resumed"
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        # What was preempted or came from another layout has no drafts any more.
        for name in (*cached.resumed_req_ids, *(new.req_id for new in step.scheduled_new_reqs)):
            self._drafts.pop(name, None)
        names = list(step.num_scheduled_tokens)
        sampled = [self._sample(name, computed[name], step) for name in names]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        k = step.num_spec_tokens_to_schedule
        proposed = [
            list(propose(self.tokens[name], SHORTEST, LONGEST, k)) if tokens and k else []
            for name, tokens in zip(names, sampled, strict=True)
        ]
        self._drafts |= zip(names, proposed, strict=True)
        drafts = DraftTokenIds(names, proposed) if names and k else None
        return StepResult(replica, output, 0.01, drafts)

    def _sample(self, name: str, computed: int, step: Any) -> list[int]:
        tokens = self.tokens[name]
        drafts = step.scheduled_spec_decode_tokens.get(name, [])
        assert drafts == self._drafts.get(name, []), f"{name}: not its drafts"
        at = computed + step.num_scheduled_tokens[name] - len(drafts)
        if at < len(tokens):
            assert not drafts, f"{name}: drafts within what is known"
            return []
        assert at == len(tokens), f"{name}: {at} tokens, not {len(tokens)}"
        right = 0
        while right < len(drafts) and drafts[right] == text(name, at + right):
            right += 1
        new = [text(name, at + i) for i in range(right + 1)]
        tokens += new
        self.drafted += len(drafts)
        self.accepted += right
        return new


def text(name: str, position: int) -> int:
    """The model's token of a request at a position: a phrase of five, now and then another one."""
    rng = random.Random(f"{name} {position}")
    return rng.randrange(100, 400) if rng.random() < 0.15 else 10 + position % 5


class Front:
    """A `PATScheduler` with such workers, and what comes out of it.

    Attributes:
        texts: output tokens by request.
        ended: requests that ended.
    """

    def __init__(self, num_blocks: int) -> None:
        config, stock = engine_config(
            8,
            num_blocks=num_blocks,
            speculative_config=SPECULATIVE,
            long_prefill_token_threshold=PROMPT // 2,
        )
        self.workers = Workers()
        self.workers.setup = Setup.of(config)
        executor_module._executors[config.instance_id] = self.workers  # type: ignore[assignment]
        self.scheduler: Any = PATScheduler(vllm_config=config, **stock)
        self.texts: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def add(self, name: str, seed: int, max_tokens: int) -> None:
        """Let a request arrive."""
        new = request(name, seed, PROMPT)
        new.max_tokens = max_tokens
        self.texts[name] = []
        self.scheduler.add_request(new)

    def start(self) -> Any:
        """Start the steps that are due, with the workers' draft length."""
        self.scheduler.controller.drafts.request(self.workers.k)
        step = self.scheduler.schedule()
        self.workers.start(step)
        return step

    def step(self, rng: random.Random) -> None:
        """As `EngineCore.step`; some of the replicas get ready."""
        step = self.start()
        outputs = self.scheduler.update_from_output(step, self.workers.finished(some=rng))
        for client in outputs.values():
            for output in client.outputs:
                self.texts[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)

    def requests(self) -> list[Any]:
        """The unfinished requests."""
        replicas = self.scheduler.replica_set.replicas
        return [request for replica in replicas for request in replica.scheduler.requests.values()]


def check_storm(
    seed: int, requests: int = 24, num_blocks: int = 200, arrivals: float = 0.4
) -> None:
    """Random switches, draft lengths, arrivals and aborts: every token comes once, in order."""
    rng = random.Random(seed)
    front = Front(num_blocks)
    lengths = {f"r{i}": rng.randint(1, 60) for i in range(requests)}
    waiting = list(lengths)
    given_up: set[str] = set()
    dropped = 0
    for _ in range(2000):
        if waiting and rng.random() < arrivals:
            name = waiting.pop()
            front.add(name, len(waiting), lengths[name])
        live = [request.request_id for request in front.requests()]
        if live and rng.random() < 0.03:
            front.scheduler.finish_requests(
                name := rng.choice(live), RequestStatus.FINISHED_ABORTED
            )
            given_up.add(name)
        if rng.random() < 0.3:
            if rng.random() < 0.5:
                front.start()
            dropped += any(request.spec_token_ids for request in front.requests())
            tp = rng.choice((1, 2, 4, 8))
            same = front.scheduler.replica_set.layout.tp == tp
            assert front.scheduler.controller.request_switch(tp)
            assert same or not any(request.spec_token_ids for request in front.requests())
        front.workers.k = rng.choice(LENGTHS)
        front.step(rng)
        if not waiting and not front.requests():
            break
    else:
        raise AssertionError("the requests do not end")
    front.step(rng)
    for name, tokens in front.texts.items():
        expected = [text(name, PROMPT + i) for i in range(lengths[name])]
        assert tokens == (expected[: len(tokens)] if name in given_up else expected), name
    assert front.ended >= lengths.keys() - given_up
    workers = front.workers
    samples = front.scheduler.controller.report().drafts
    assert sum(sample.counts.drafted for sample in samples) == workers.drafted > 100
    assert sum(sample.counts.accepted for sample in samples) == workers.accepted
    assert 0.3 < workers.accepted / workers.drafted < 0.9
    assert dropped > 3
    assert set(workers.lengths) == set(LENGTHS)
    steps: Counter[int] = Counter()
    for sample in samples:
        steps[sample.num_speculative_tokens] += sample.steps
    assert steps == workers.lengths
    assert {(sample.layout.tp, sample.replica) for sample in samples} == {
        (tp, replica) for tp in (1, 2, 4, 8) for replica in range(8 // tp)
    }
    assert [sample.at for sample in samples] == sorted(sample.at for sample in samples)
