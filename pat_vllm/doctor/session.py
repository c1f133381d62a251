"""The checks of one engine, in a process of its own: `python -m pat_vllm.doctor.session`.

What it is doing and what it found goes to a file, a line of JSON at a time (`child.py` reads it).
The engine core has its own process, as for users: a switch is asked for while it generates.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pat_vllm.doctor.compare import (
    Agreement,
    Output,
    Reference,
    compare_forced,
    compare_outputs,
)
from pat_vllm.doctor.in_workers import FACTS_METHOD, Handle, load_by_ipc, memory_of, shared_tensor
from pat_vllm.doctor.journal import Ended, Journal
from pat_vllm.layout import Layout
from pat_vllm.profiling.cache import CACHE_DIR

if TYPE_CHECKING:
    from vllm import LLM

SWITCH_AFTER = 4
"""Answers of the engine after which a switch is asked for."""
_TRIES = 3
"""To switch before the last response has ended."""
_LIKELIEST = 5
Prompts = tuple[tuple[int, ...], ...]
"""Token ids, by request."""


@dataclass(frozen=True)
class Session:
    """An engine, what it is asked, and what it is compared with.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        other_weights: folder of a checkpoint of the same shape, for a weight update.
        prompts: token ids of the requests.
        max_tokens: each of them generates, greedily.
        references: of the first weights and of the others; none for stock vLLM, which makes them.
        draft_lengths: to go through while it generates; the engine speculates if there are any.
        sleeps: it can be put to sleep.
        graphs: it must have captured CUDA graphs.
        as_used: of an engine as its user would have it, what is not the user's; else empty.
    """

    engine: dict[str, Any]
    other_weights: str
    prompts: Prompts
    max_tokens: int
    references: tuple[Reference, ...] = ()
    draft_lengths: tuple[int, ...] = ()
    sleeps: bool = True
    graphs: bool = False
    as_used: str = ""


SESSION = TypeAdapter(Session)
REFERENCES = TypeAdapter(tuple[Reference, ...])


# -------------------------------------------------------------------- stock vLLM


def make_references(session: Session, journal: Journal) -> tuple[Reference, ...]:
    """What stock vLLM says, with either of the weights."""
    from vllm import LLM

    made = []
    for label, model in (("", session.engine["model"]), (" new weights", session.other_weights)):
        with journal.check(f"stock vLLM{label}") as found:
            llm = LLM(**{**session.engine, "model": model})
            outputs = generate(llm, session, journal.beat, likeliest=_LIKELIEST)
            forced = score(llm, session.prompts, outputs)
            llm.llm_engine.engine_core.shutdown()
            del llm
            reference = Reference(outputs, forced)
            found.append(f"{len(outputs)} requests; off itself by {reference.noise:.1e}")
            if (problem := reference.problem) is not None:
                raise ValueError(problem)
            made.append(reference)
    return tuple(made)


# -------------------------------------------------------------------- PAT


def check_engine(session: Session, journal: Journal) -> None:
    """All checks of an engine with PAT."""
    from vllm import LLM

    from pat_vllm.api import report

    with journal.check("start") as found:
        llm = LLM(**session.engine)
        layouts = report(llm).layouts
        found.append(f"layouts {', '.join(map(str, layouts))}")
        if session.as_used:
            lengths = [len(prompt) for prompt in session.prompts]
            found.append(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens")
            found.append(session.as_used)
        if session.graphs:
            found.append(captured(llm))
    try:
        _check_layouts(llm, layouts, session, journal)
    except Ended:
        # Or this process would wait for the engine's at its end.
        with suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        raise
    with journal.check("shutdown"):
        llm.llm_engine.engine_core.shutdown()


def _check_layouts(llm: LLM, layouts: Sequence[Layout], session: Session, journal: Journal) -> None:
    first, other = session.references
    if session.as_used:
        with journal.check("layouts as the policy chooses") as found:
            found += by_policy(llm, session, journal, first)
    for layout in layouts:
        with journal.check(f"layout {layout}") as found:
            found += in_layout(llm, session, journal, layout, first)
    for source, target in permutations(layouts, 2):
        with journal.check(f"{source} -> {target} with requests in flight") as found:
            found += across(llm, session, journal, source, target, first)
    if session.draft_lengths:
        with journal.check("draft length changes with requests in flight") as found:
            found += with_drafts(llm, session, journal, layouts[-1], first)
    lost = session.sleeps and bool(session.as_used)
    on_cpu = llm.llm_engine.vllm_config.device_config.device_type == "cpu"
    if session.sleeps and not lost:
        with journal.check("sleep and wake-up") as found:
            llm.sleep(level=1)
            llm.wake_up()
            if on_cpu:
                found.append("without effect on CPU")
            found += in_layout(llm, session, journal, layouts[-1], first)
    with journal.check("sleep at level 2, weight update" if lost else "weight update") as found:
        switch_to(llm, layouts[-1])
        if lost:
            llm.sleep(level=2)
            llm.wake_up(["weights"])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": session.other_weights})
        if lost:
            llm.wake_up(["kv_cache"])
            found.append("sleep is without effect on CPU" if on_cpu else "in place of lost weights")
        llm.reset_prefix_cache()
        for layout in layouts:
            found += in_layout(llm, session, journal, layout, other)
    if session.as_used:
        with journal.check("weight update by IPC") as found:
            switch_to(llm, layouts[-1])
            found.append(send_by_ipc(llm, session.engine["model"], on_cpu))
            llm.reset_prefix_cache()
            for layout in layouts:
                found += in_layout(llm, session, journal, layout, first)


def send_by_ipc(llm: LLM, model: str, on_cpu: bool) -> str:
    """Update from this process's memory: handles of it travel, as from a trainer on these GPUs.

    Args:
        model: folder of a checkpoint with one file of weights.

    Returns:
        What memory it was.
    """
    import torch
    from safetensors.torch import load_file
    from torch.multiprocessing import reductions, set_sharing_strategy

    def handle_of(weight: torch.Tensor) -> Handle:
        if not on_cpu:
            handle: Handle = reductions.reduce_tensor(weight)
            return handle
        storage = reductions.reduce_storage(weight.untyped_storage())
        return shared_tensor, (storage, weight.dtype, weight.shape)

    set_sharing_strategy("file_system")  # on CPU, by a name
    handles, kept = {}, []
    for rank in range(llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size):
        device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
        weights = load_file(Path(model) / "model.safetensors", device=str(device))
        kept.append([(name, weight.clone()) for name, weight in weights.items()])
        handles[memory_of(device, rank)] = [(name, handle_of(weight)) for name, weight in kept[-1]]
        if not on_cpu:
            torch.cuda.synchronize(device)
    llm.collective_rpc(load_by_ipc, args=(handles,))
    return "shared host memory" if on_cpu else "CUDA IPC"


def captured(llm: LLM) -> str:
    """What CUDA graphs the workers have.

    Raises:
        RuntimeError: one has none.
    """
    facts = llm.collective_rpc(FACTS_METHOD)
    counts = [one["graphs"] for one in facts]
    text = f"cudagraph_mode {facts[0]['cudagraph_mode']}, {min(counts)} graphs a rank"
    if not min(counts):
        raise RuntimeError(f"no CUDA graphs were captured: {text}")
    return text


def by_policy(
    llm: LLM, session: Session, journal: Journal, expected: Reference
) -> list[Agreement | str]:
    """Generate in the layouts that the engine's policy chooses."""
    from pat_vllm.api import report

    began = time.monotonic()
    outputs = generate(llm, session, journal.beat)
    chosen = [one.target for one in report(llm, since=began).switches if one.reason == "policy"]
    went = f"it went to {', '.join(map(str, chosen))}" if chosen else "it stayed in one"
    return [went, compare_outputs(expected.outputs, outputs, expected.tolerance)]


def in_layout(
    llm: LLM, session: Session, journal: Journal, layout: Layout, expected: Reference
) -> list[Agreement | str]:
    """Generate in a layout, and score stock vLLM's tokens in it."""
    switch_to(llm, layout)
    outputs = generate(llm, session, journal.beat)
    made = compare_outputs(expected.outputs, outputs, expected.tolerance)
    if made.problem is not None:
        return [made]
    switch_to(llm, layout)
    forced = score(llm, session.prompts, expected.outputs)
    return [made, compare_forced(expected.forced, forced, expected.tolerance)]


def across(
    llm: LLM,
    session: Session,
    journal: Journal,
    source: Layout,
    target: Layout,
    expected: Reference,
) -> list[Agreement | str]:
    """Switch while requests are in flight; what they say is what they say in one layout."""
    from pat_vllm.api import report

    for _ in range(_TRIES):
        switch_to(llm, source)
        began = time.monotonic()
        after = {SWITCH_AFTER: lambda: switch_to(llm, target)}
        outputs = generate(llm, session, journal.beat, after)
        switches = [
            one
            for one in report(llm, since=began).switches
            if (one.source, one.target, one.reason) == (source, target, "forced")
        ]
        made = compare_outputs(expected.outputs, outputs, expected.tolerance)
        if made.problem is not None or (switches and switches[0].num_seqs):
            break
    else:
        raise RuntimeError(f"all responses had ended before the engine switched to {target}")
    if made.problem is not None:
        return [made]
    # The engine may have gone home; as the switch left them, weights are looked at by scores.
    switch_to(llm, source)
    switch_to(llm, target)
    forced = score(llm, session.prompts, expected.outputs)
    one = switches[0]
    moved = f"{one.num_seqs} in flight, {one.migrated} migrated, {1e3 * one.seconds:.0f} ms"
    return [moved, made, compare_forced(expected.forced, forced, expected.tolerance)]


def with_drafts(
    llm: LLM, session: Session, journal: Journal, layout: Layout, expected: Reference
) -> list[Agreement | str]:
    """Go through the draft lengths while requests are in flight."""
    from pat_vllm.api import report, speculate

    switch_to(llm, layout)
    began = time.monotonic()
    calls = {
        1 + at: partial(speculate, llm, length) for at, length in enumerate(session.draft_lengths)
    }
    outputs = generate(llm, session, journal.beat, calls)
    drafts = report(llm, since=began).drafts
    drafted = sum(one.drafted for one in drafts)
    accepted = sum(one.accepted for one in drafts)
    lengths = ", ".join(map(str, session.draft_lengths))
    return [
        f"k = {lengths}: {accepted} of {drafted} accepted",
        compare_outputs(expected.outputs, outputs, expected.tolerance),
    ]


def switch_to(llm: LLM, layout: Layout) -> None:
    """Switch, or say why not."""
    from pat_vllm.api import report, switch

    if not switch(llm, str(layout)):
        refused = report(llm).refused
        raise RuntimeError(
            f"the switch to {layout} was refused: {refused[-1].why if refused else '?'}"
        )


# -------------------------------------------------------------------- vLLM


def generate(
    llm: LLM,
    session: Session,
    beat: Callable[[], None],
    after: Mapping[int, Callable[[], None]] | None = None,
    likeliest: int = 0,
) -> tuple[Output, ...]:
    """Serve the requests.

    Args:
        beat: called at each answer of the engine.
        after: what to call after so many of its answers.
        likeliest: tokens whose log-probabilities to keep at each position.

    Returns:
        Outputs by request.
    """
    from vllm import RequestOutput, SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(
        temperature=0.0,
        max_tokens=session.max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=likeliest,
    )
    for number, prompt in enumerate(session.prompts):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
    outputs: dict[int, Output] = {}
    answers = 0
    while engine.has_unfinished_requests():
        answered = engine.step()
        if not answered:
            continue
        answers += 1
        beat()
        if after and answers in after:
            after[answers]()
        for one in answered:
            if one.finished:
                assert isinstance(one, RequestOutput)
                outputs[int(one.request_id)] = _output_of(one.outputs[0], likeliest)
    return tuple(outputs[number] for number in range(len(session.prompts)))


def _output_of(completion: Any, likeliest: int) -> Output:
    tokens = tuple(completion.token_ids)
    entries = [{t: float(e.logprob) for t, e in one.items()} for one in completion.logprobs]
    logprobs = tuple(one[token] for one, token in zip(entries, tokens, strict=True))
    return Output(tokens, logprobs, tuple(entries) if likeliest else ())


def score(
    llm: LLM, prompts: Sequence[Sequence[int]], outputs: Sequence[Output]
) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities of given outputs, computed as a prompt's, by request."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
    sequences = [[*a, *b.tokens] for a, b in zip(prompts, outputs, strict=True)]
    answers = llm.generate(
        [TokensPrompt(prompt_token_ids=one) for one in sequences], params, use_tqdm=False
    )
    scores = []
    for prompt, sequence, answer in zip(prompts, sequences, answers, strict=True):
        entries = (answer.prompt_logprobs or [])[len(prompt) :]
        tokens = sequence[len(prompt) :]
        known = [entry for entry in entries if entry is not None]  # only a first token has none
        scores.append(tuple(e[t].logprob for e, t in zip(known, tokens, strict=True)))
    return tuple(scores)


# -------------------------------------------------------------------- the process


def main(request: str, answer: str, journal: str) -> None:
    """Files in, files out; `answer` gets the references if the session has none."""
    session = SESSION.validate_json(Path(request).read_text())
    # The profile of a random model is of no use later.
    os.environ[CACHE_DIR] = str(Path(answer).parent)
    if session.as_used:
        # vLLM wants it said that functions, and handles of memory, may be sent to its workers.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    with Path(journal).open("a") as file:
        lines = Journal(file)
        try:
            if session.references:
                check_engine(session, lines)
            else:
                references = make_references(session, lines)
                Path(answer).write_bytes(REFERENCES.dump_json(references))
        except Ended:
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
