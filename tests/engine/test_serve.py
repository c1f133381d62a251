"""`vllm serve` with the OpenAI client."""

from __future__ import annotations

import urllib.error
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.engine.test_async import drafts_of
from tests.support.fork_server import Program
from tests.support.serve import PATIENCE, Server

POLICY = {"kind": "schedule", "switch_at": {"6": 2, "4": 1, "2": 2}, "idle_seconds": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Its processes start sooner than for users."""
    pat = {"policy": POLICY, "kv_transfer": "migrate"}
    server = Server(tmp_path / "serve.log", pat, popen=Program)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def test_vllm_serve(server: Server) -> None:
    """Concurrent streams, switches by policy and on demand under load, metrics, a clean end.

    Then the same with drafts, on demand as well.
    """
    # Streams with a long tail, in which the policy switches. Two answers without streaming, which
    # leave the front end the time to take commands.
    tail, long = [40 + 20 * index for index in range(8)], [700, 700]
    served: list[int] = []

    def complete(lengths: list[int], stream: bool) -> list[tuple[str, int]]:
        served.extend(lengths)
        answers = server.complete(lengths, stream)
        assert [tokens for _, tokens in answers] == lengths
        return answers

    def in_one_layout(lengths: list[int], stream: bool) -> list[tuple[str, int]]:
        """It is asked for, so the policy waits. Between requests that a busy machine sends late the
        engine is idle, and the policy free again."""
        for _ in range(5):
            server.switch(1)
            before = server.report().switches
            answers = complete(lengths, stream)
            if server.report().switches == before:
                return answers
        raise AssertionError("the layout that was asked for was left each time")

    # The policy's switches, one way and back. A busy machine may send requests so late that few are
    # there at once, and the policy goes one way only.
    reference = in_one_layout(tail, True), in_one_layout(long, False)
    assert len({text for text, _ in reference[0]}) == len(tail)
    count = len(server.report().switches)
    for _ in range(5):
        assert complete(tail, True) == reference[0]
        switches = server.report().switches[count:]
        by_policy = {
            switch.target.tp for switch in switches if switch.reason == "policy" and switch.num_seqs
        }
        if by_policy == {1, 2}:
            break
    assert by_policy == {1, 2}

    # Switches on demand.
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(complete, long, False)
        # On a busy machine the answers may outlast no command: then the switches come after them.
        while not answers.done() and server.report().timeline[-1].num_seqs < len(long):
            pass
        for tp in (2, 1) * 3:
            server.switch(tp)
        assert answers.result(timeout=PATIENCE) == reference[1]
    assert any(switch.reason == "forced" for switch in server.report().switches)
    with pytest.raises(urllib.error.HTTPError):
        server.rpc("pat_switch_layout", 7)

    assert server.metric("vllm:generation_tokens_total") == sum(served)
    assert server.metric("vllm:request_success_total") == len(served)
    assert server.metric("vllm:num_preemptions_total") == 0
    assert server.metric("vllm:num_requests_running") == 0

    # PAT's metrics are those of the report, also of what happened when the last response had ended.
    def agrees() -> bool:
        # Metrics travel with outputs: those of what happens when nothing runs, with the next ones.
        server.complete([8], stream=False)
        counts = Counter(
            f'engine="0",model_name="tiny",reason="{s.reason}",source="{s.source}",target="{s.target}"'
            for s in server.report().switches
        )
        values = server.values("vllm:pat_switches_total")
        return {labels: value for labels, value in values.items() if value} == counts

    server.child.wait_for(agrees, "its metrics agree with the report")
    report = server.report()
    assert server.metric("vllm:pat_switch_stall_seconds_count") == len(report.switches)
    stalls = sum(switch.seconds for switch in report.switches)
    assert server.metric("vllm:pat_switch_stall_seconds_sum") == pytest.approx(stalls)
    assert server.metric("vllm:pat_num_requests_by_replica") == 0
    assert server.metric("vllm:pat_refused_switches_total") == 0
    assert server.metric("vllm:pat_tensor_parallel_size") == report.layout.tp
    assert server.metric("vllm:pat_num_replicas") == report.layout.replicas

    # With drafts: no text changes of the greedy half, and the metrics are those of the report.
    assert drafts_of(report) == (0, 0)
    server.rpc("pat_speculate", 4)
    assert complete(tail, True)[1::2] == reference[0][1::2]
    # That holds until the engine is idle, as it may be between requests that a busy machine sends
    # late. So how much is accepted is seen in a request that is alone.
    server.rpc("pat_speculate", 4)
    before = drafts_of(server.report())
    complete(tail[-1:], True)
    drafted, accepted = drafts_of(server.report())
    assert 0.2 < (accepted - before[1]) / (drafted - before[0]) < 0.9
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == drafted
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") == accepted
    # Of one or two replicas; 0 once the engine went back.
    assert server.metric("vllm:pat_num_speculative_tokens_by_replica") in (0, 4, 8)

    assert server.most_pieces > 1
    assert len(server.family) == 4  # front end, engine core, two workers
    assert server.stop() == 0
    _, left = psutil.wait_procs(server.family, timeout=PATIENCE)
    assert not left
