"""verl's own server and weight push over a PAT engine, checked token by token.

What the engine says, each token's log-probability included, is compared with what transformers
computes from the weights that were pushed last.
"""

from __future__ import annotations

import asyncio
import math
import re
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("verl")

from tests.verl.models import KNOWN, few_tokens
from tests.verl.reference import CLOSE, Reference
from tests.verl.servers import Response, Server, server

ARCH = "qwen3"
PROMPTS = [[5 + i, 6, 7, 8 + i % 3] for i in range(6)]
DRAFTS = (
    "engine_kwargs.vllm.speculative_config={method:ngram,num_speculative_tokens:4,"
    "prompt_lookup_min:2,prompt_lookup_max:4,num_speculative_tokens_per_batch_size:[[1,1,0]]}"
)
"""Speculative decoding on demand: without that there are no drafts."""


@pytest.fixture(scope="module")
def pat() -> Iterator[Server]:
    with server(few_tokens(ARCH, 0), DRAFTS, disable_log_stats="false") as running:
        yield running


@pytest.fixture(scope="module")
def old() -> Reference:
    return Reference(few_tokens(ARCH, 0))


@pytest.fixture(scope="module")
def new() -> Reference:
    return Reference(few_tokens(ARCH, 1))


async def while_regrouping(pat: Server, work: Any, pause: float = 0.05) -> Any:
    """The result of `work`, with a switch back and forth all the while, one in `pause` seconds."""
    task = asyncio.ensure_future(work)
    tp = 1
    while not task.done():
        tp = 3 - tp
        await pat.actor.pat_switch.remote(tp)
        await asyncio.sleep(pause)
    return await task


def in_layout(pat: Server, tp: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Response]:
    """A batch that is generated in one layout from start to end."""
    assert pat.call("pat_switch", tp)
    return pat.generate_all(prompts, max_tokens=24)


def regrouped(
    pat: Server,
    max_tokens: int = 80,
    pause: float = 0.05,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Response]:
    """A batch during which the layout changes."""

    async def batch() -> list[Response]:
        requests = [pat.generate(p, max_tokens=max_tokens, ignore_eos=True) for p in prompts]
        return await while_regrouping(pat, asyncio.gather(*requests), pause)

    before = len(moved(pat))
    responses: list[Response] = pat.do(batch())
    assert len(moved(pat)) > before
    return responses


def moved(pat: Server) -> list[Any]:
    """Switches that took requests along."""
    return [s for s in pat.call("pat_report").switches if s.num_seqs and s.migrated + s.recomputed]


def test_ids_beyond_the_tokenizer_are_masked_in_every_layout(pat: Server, old: Reference) -> None:
    for tp in (1, 2):
        responses = in_layout(pat, tp)
        old.check(responses, PROMPTS)
        free = [
            int(old.logits(prompt, response.token_ids).argmax(-1).max())
            for prompt, response in zip(PROMPTS, responses, strict=True)
        ]
        assert max(free) >= KNOWN  # or this could not fail


def test_weights_pushed_between_regroups(pat: Server, old: Reference, new: Reference) -> None:
    before = [in_layout(pat, 1), in_layout(pat, 2)]
    old.check(regrouped(pat), PROMPTS)

    pat.do(pat.push(few_tokens(ARCH, 1), step=1))
    for tp in (2, 1):
        changed = in_layout(pat, tp)
        new.check(changed, PROMPTS)
        assert [r.token_ids for r in changed] != [r.token_ids for r in before[0]]
        assert {r.global_steps for r in changed} == {1}
    new.check(regrouped(pat), PROMPTS)

    pat.call("pat_switch", 2)  # weights arrive while the wider layout is active
    pat.do(pat.push(few_tokens(ARCH, 0), step=2))
    after = [in_layout(pat, 1), in_layout(pat, 2)]
    for then, now in zip(before, after, strict=True):
        assert [r.token_ids for r in now] == [r.token_ids for r in then]
        for response, earlier in zip(now, then, strict=True):
            assert response.logprobs == pytest.approx(earlier.logprobs, abs=CLOSE)
    old.check(regrouped(pat), PROMPTS)


def test_aborted_for_an_update_and_taken_up_again(
    pat: Server, old: Reference, new: Reference
) -> None:
    """A partial rollout: the first tokens are of the old weights, the rest of the new ones."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    client = pat.manager.get_client(FullyAsyncLLMServerClient)
    length = 150

    async def update_in_flight() -> list[Response]:
        requests = asyncio.gather(
            *[pat.generate(p, client, max_tokens=length, ignore_eos=True) for p in PROMPTS]
        )
        await asyncio.sleep(0.2)
        await pat.actor.pat_switch.remote(2)
        await asyncio.sleep(0.1)
        aborted = await pat.replica.abort_all_requests()
        assert aborted["aborted_count"] == len(PROMPTS)
        await pat.push(few_tokens(ARCH, 1), step=3)
        await pat.replica.resume_generation()
        return await while_regrouping(pat, requests)

    responses: list[Response] = pat.do(update_in_flight())
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert len(response.token_ids) == length
        of_old = [error < CLOSE for error in old.errors(prompt, response)]
        of_new = [error < CLOSE for error in new.errors(prompt, response)]
        seam = of_old.index(False)
        assert 0 < seam < length
        assert all(of_new[seam:])

    pat.do(pat.push(few_tokens(ARCH, 0), step=4))
    old.check(in_layout(pat, 2), PROMPTS)


def test_updated_while_requests_run(pat: Server, new: Reference, old: Reference) -> None:
    """vLLM's semantics: they go on with the new weights. Never with some of each."""

    async def update_in_flight() -> list[Response]:
        requests = asyncio.gather(
            *[pat.generate(p, max_tokens=150, ignore_eos=True) for p in PROMPTS]
        )
        await asyncio.sleep(0.2)
        await pat.actor.pat_switch.remote(2)
        await pat.push(few_tokens(ARCH, 1), step=5)
        return await while_regrouping(pat, requests)

    assert all(len(r.token_ids) == 150 for r in pat.do(update_in_flight()))
    for tp in (1, 2):
        new.check(in_layout(pat, tp), PROMPTS)
    pat.do(pat.push(few_tokens(ARCH, 0), step=6))
    old.check(in_layout(pat, 1), PROMPTS)


def test_one_request_is_aborted(pat: Server) -> None:
    async def abort_one() -> Any:
        requests = [
            pat.actor.generate.remote(
                prompt,
                {"max_tokens": 150, "ignore_eos": True, "temperature": 0.0, "logprobs": True},
                f"abort-{index}",
            )
            for index, prompt in enumerate(PROMPTS)
        ]
        await asyncio.sleep(0.2)
        result = await pat.replica.abort_request("abort-0")
        return result, await asyncio.gather(*requests)

    result, responses = pat.do(abort_one())
    assert result["aborted"], result
    assert [r.stop_reason for r in responses] == ["aborted"] + ["completed"] * 5
    assert 0 < len(responses[0].token_ids) < 150
    assert all(len(r.log_probs) == len(r.token_ids) for r in responses)


def test_weights_lost_in_sleep(pat: Server, old: Reference) -> None:
    """What trainers do around a weight push. The stand-in for sleep loses what a GPU would."""
    pat.call("pat_switch", 2)
    for pushed in (False, True):
        pat.do(pat.replica.abort_all_requests())
        pat.do(pat.replica.release_kv_cache())
        if pushed:
            pat.do(pat.push(few_tokens(ARCH, 0), step=7))
        pat.do(pat.replica.resume_kv_cache())
        pat.do(pat.replica.resume_generation())
        if not pushed:
            lost = in_layout(pat, 2)
            assert all(math.isnan(logprob) for r in lost for logprob in r.logprobs)
    for tp in (2, 1):
        old.check(in_layout(pat, tp), PROMPTS)
    for method in ("sleep", "wake_up", "clear_kv_cache"):
        pat.do(getattr(pat.replica, method)())
    old.check(regrouped(pat), PROMPTS)


def test_stop_strings(pat: Server, old: Reference) -> None:
    """They are sought in text, which is not made of other requests."""
    from transformers import AutoTokenizer

    (whole, *_) = in_layout(pat, 1)
    tokenizer = AutoTokenizer.from_pretrained(few_tokens(ARCH, 0))
    text = tokenizer.decode(whole.token_ids[:6], skip_special_tokens=True)
    assert text
    (stopped,) = pat.generate_all(PROMPTS[:1], max_tokens=24, stop=[text])
    assert stopped.stop_reason == "completed"
    # Its last character may be whole one token later.
    assert stopped.token_ids in (whole.token_ids[:6], whole.token_ids[:7])
    old.check([stopped], PROMPTS[:1])


def test_drafts(pat: Server, old: Reference) -> None:
    """Drafts are verified with the weights that were pushed last, whatever layout is active."""
    repeating = few_tokens(ARCH, 0, repeat=1.2)
    pat.do(pat.push(repeating, step=8))
    assert not any(sample.counts.drafted for sample in pat.call("pat_report").drafts)
    pat.call("pat_speculate", 4)
    Reference(repeating).check(regrouped(pat), PROMPTS)
    drafts = pat.call("pat_report").drafts
    drafted = sum(sample.counts.drafted for sample in drafts)
    assert 0.2 < sum(sample.counts.accepted for sample in drafts) / drafted < 0.9
    pat.do(pat.push(few_tokens(ARCH, 0), step=9))
    old.check(in_layout(pat, 1), PROMPTS)


def test_metrics(pat: Server) -> None:
    """At verl's own address."""
    regrouped(pat)
    report = pat.call("pat_report")
    pat.generate_all(PROMPTS[:1], max_tokens=4)  # what happened last comes with the next step
    (address,) = pat.manager.get_addresses()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        text = response.read().decode()
    lines = re.findall(r"^vllm:pat_switches_total\{(.*)\} (\S+)$", text, flags=re.MULTILINE)
    shown = sum(float(value) for labels, value in lines if 'reason="forced"' in labels)
    assert shown == sum(switch.reason == "forced" for switch in report.switches) > 0
    assert re.search(r"^vllm:pat_tensor_parallel_size\{", text, flags=re.MULTILINE)


def test_lengths_are_learnt_across_iterations(pat: Server) -> None:
    before = pat.call("pat_report").predictor
    prompts = [[40 + i, 3 * i + 7] for i in range(12)]
    samples = [prompt for prompt in prompts for _ in range(4)]
    lengths = set()
    for _ in range(2):
        responses = pat.generate_all(samples, max_tokens=200, stop_token_ids=list(range(100, 120)))
        lengths |= {len(r.token_ids) for r in responses}
    assert len(lengths) > 4
    after = pat.call("pat_report").predictor
    # Iterations with nothing between them are one batch, which is not over yet.
    assert after.responses == before.responses + 2 * len(samples)
