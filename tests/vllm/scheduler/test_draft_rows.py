"""Which earlier responses a request may look into, and that every rank of its replica has them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import FinishReason

from pat_vllm.drafts.corpus import BETWEEN_ROWS, TAIL_TOKENS
from pat_vllm.drafts.history_file import HistoryFile
from pat_vllm.drafts.shelf import Shelf
from pat_vllm.layout import Layout
from pat_vllm.scheduler import draft_rows
from pat_vllm.scheduler.draft_rows import MOST_TOKENS, DraftRows
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.worker.worker import PATWorkerMixin
from tests.unit.reporting.samples import switch_report
from tests.vllm import without_workers

RANKS, VOCAB = 4, 512
PROMPT = [7, 8, 9]


def blocks_of(tokens: Sequence[int]) -> list[Any]:
    """A hash of each whole block of two tokens, of all up to its end."""
    return [tuple(tokens[:end]) for end in range(2, len(tokens) + 1, 2)]


def new_request(name: str, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(prompt),
        output_token_ids=[],
        block_hashes=blocks_of(prompt),
        cache_salt=None,
        sampling_params=SamplingParams(**sampling),
    )


def rows_for(max_bytes: int = 1 << 20, max_num_seqs: int = 8) -> DraftRows:
    return DraftRows(max_bytes, RANKS, max_num_seqs)


def arrive(rows: DraftRows, request: Any) -> Any:
    rows.add(request)
    return request


def end(rows: DraftRows, request: Any, *response: int, reason: Any = FinishReason.STOP) -> None:
    request.output_token_ids = list(response)
    request.block_hashes = blocks_of([*request.prompt_token_ids, *response])
    rows.remove(request, reason)


def told(rows: DraftRows, *names: str) -> dict[str, list[list[int]]]:
    """The responses that a step with these requests tells the ranks of."""
    update = rows.update(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)), names, [0])
    shelf = Shelf()
    if update is not None:
        shelf.take(update)
    responses = {}
    for name in shelf:
        text = shelf.text_of(name).tolist()
        starts = [at for at, token in enumerate(text) if token == BETWEEN_ROWS] + [len(text)]
        responses[name] = [text[a + 1 : b] for a, b in pairwise(starts)]
    return responses


def test_responses_to_the_same_prompt() -> None:
    rows = rows_for()
    end(rows, arrive(rows, new_request("a")), 1, 2)
    end(rows, arrive(rows, new_request("other", [5, 6])), 3)
    arrive(rows, new_request("b"))
    assert rows.repeated == {"b"}
    assert told(rows, "b") == {"b": [[*PROMPT, 1, 2]]}
    assert told(rows, "b") == {}, "once"


def test_siblings_that_end_are_seen_by_those_that_run() -> None:
    rows = rows_for()
    a, _ = arrive(rows, new_request("a")), arrive(rows, new_request("b"))
    assert told(rows, "a", "b") == {}
    end(rows, a, 4, 5)
    assert told(rows, "a") == {}, "b has no step"
    assert told(rows, "b") == {"b": [[*PROMPT, 4, 5]]}


@pytest.mark.parametrize(
    ("sampling", "sees"),
    [({}, True), ({"temperature": 0.0, "seed": 3}, True), ({"seed": 3}, False)],
    ids=["sampled", "greedy", "with a seed"],
)
def test_a_request_that_samples_with_a_seed_sees_none(sampling: Any, sees: bool) -> None:
    rows = rows_for()
    end(rows, arrive(rows, new_request("a", **sampling)), 1)
    b = arrive(rows, new_request("b", **sampling))
    assert ("b" in rows.repeated) == sees
    arrive(rows, new_request("c"))
    assert "c" in rows.repeated, "its own responses are for others"
    end(rows, b, 2)
    assert len(told(rows, "c")["c"]) == 2


def test_what_was_aborted_is_not_kept() -> None:
    rows = rows_for()
    end(rows, arrive(rows, new_request("a")), 1, reason=FinishReason.ABORT)
    end(rows, arrive(rows, new_request("b")))
    arrive(rows, new_request("c"))
    assert "c" not in rows.repeated


def test_a_turn_goes_by_the_prompt_of_the_first() -> None:
    rows = rows_for()
    end(rows, arrive(rows, new_request("first")), 1)
    end(rows, arrive(rows, new_request("second", [*PROMPT, 1, 50])), 2)
    arrive(rows, new_request("again"))
    assert told(rows, "again")["again"] == [[*PROMPT, 1], [*PROMPT, 1, 50, 2]]


def test_a_template_may_replace_the_last_token_of_a_response() -> None:
    """The blocks before it are known again."""
    rows = rows_for()
    end(rows, arrive(rows, new_request("first")), 1, 2, 3)
    arrive(rows, new_request("second", [*PROMPT, 1, 2, 60, 50]))
    assert told(rows, "second") == {"second": [[*PROMPT, 1, 2, 3]]}
    arrive(rows, new_request("other", [*PROMPT[:2], 50]))
    assert "other" not in rows.repeated, "what prompts have in common continues none"


def test_only_so_many_ended_requests_are_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_rows, "_REMEMBERED_ENDS", 1)
    rows = rows_for()
    for name, prompt in (("a", PROMPT), ("b", [5, 6, 7])):
        end(rows, arrive(rows, new_request(name, prompt)), 1)
    arrive(rows, new_request("a+", [*PROMPT, 1, 50]))
    arrive(rows, new_request("b+", [5, 6, 7, 1, 50]))
    assert rows.repeated == {"b+"}


def test_who_brings_a_salt_sees_his_own() -> None:
    rows, salted = rows_for(), new_request("a")
    salted.cache_salt = "me"
    end(rows, arrive(rows, salted), 1)
    arrive(rows, new_request("b"))
    assert "b" not in rows.repeated


def test_rows_are_bounded_for_a_request_and_for_all_of_them() -> None:
    for most, seqs in ((MOST_TOKENS, 8), (1 << 14, 1024)):
        rows = rows_for(1 << 28, seqs)
        for number in range(12):
            end(rows, arrive(rows, new_request(str(number))), *[number] * 15_000)
        arrive(rows, new_request("b"))
        got = told(rows, "b")["b"]
        assert sum(map(len, got)) <= most
        assert got[-1][-1] == 11 and len(got) == most // (15_000 + len(PROMPT) + 1)


def test_many_short_responses_to_one_prompt_are_few_rows() -> None:
    rows = rows_for()
    for number in range(500):
        end(rows, arrive(rows, new_request(str(number))), 5)
    names = [f"live {number}" for number in range(64)]
    for name in names:
        arrive(rows, new_request(name))
    step = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))
    update = rows.update(step, names, [0])
    assert update is not None and len(update.rows) <= 128
    assert len({id(ids) for ids in update.of_requests.values()}) == 1, "all have the same"


def test_every_rank_has_the_rows_of_its_replicas_requests() -> None:
    """Requests come, end and move with the layout; each rank's shelf goes by the updates alone."""
    draws, rows = random.Random(1), rows_for(max_bytes=6_000)
    shelves = [Shelf() for _ in range(RANKS)]
    layouts = [Layout.of(tp, RANKS) for tp in (1, 2, 4)]
    layout, homes, requests = layouts[0], dict[str, int](), dict[str, Any]()
    sent = repeated = 0
    for number in range(1500):
        if len(requests) < 10:
            prompt = [draws.randrange(6)] * TAIL_TOKENS
            requests[str(number)] = arrive(rows, new_request(str(number), prompt))
            homes[str(number)] = draws.randrange(layout.replicas)
        if draws.random() < 0.3:
            name = draws.choice(sorted(requests))
            end(rows, requests.pop(name), *draws.choices(range(50), k=draws.randint(1, 60)))
            del homes[name]
        if draws.random() < 0.05:
            layout = draws.choice(layouts)
            homes = {name: draws.randrange(layout.replicas) for name in homes}
            rows.switched(switch_report(1.0))
        for replica in range(layout.replicas):
            here = [name for name, home in homes.items() if home == replica]
            step = draws.sample(here, draws.randint(0, len(here)))
            ranks = layout.ranks_of(replica)
            update = rows.update(
                SimpleNamespace(num_scheduled_tokens=dict.fromkeys(step, 1)), here, ranks
            )
            if update is not None:
                sent += len(update.rows)
                repeated += sum(len(ids) for ids in update.of_requests.values())
                for rank in ranks:
                    shelves[rank].take(update)
                    assert set(shelves[rank]) <= set(here)
            for name in step:
                expected = [row.tokens for row in rows._rows.get(name, ())]
                for rank in ranks:
                    text = shelves[rank].text_of(name)
                    assert text.tolist() == [t for row in expected for t in row.tolist()]
    assert 0 < sent < repeated / 2, "a row is sent once, not with each request"
    assert np.mean([sum(1 for row in range(2000) if row in shelf) for shelf in shelves]) < 200


def test_the_next_engine_drafts_from_what_is_kept(tmp_path: Path) -> None:
    first = DraftRows(1 << 20, RANKS, 8, HistoryFile(tmp_path, VOCAB))
    end(first, arrive(first, new_request("a")), 1, 2, 3)
    first.batch_over(0.0)
    end(first, arrive(first, new_request("b")), 4, 5)
    first.close()
    second = DraftRows(1 << 20, RANKS, 8, HistoryFile(tmp_path, VOCAB))
    arrive(second, new_request("c"))
    assert told(second, "c") == {"c": [[*PROMPT, 1, 2, 3], [*PROMPT, 4, 5]]}
    # What an engine without room keeps is nothing, and so it reads nothing.
    nothing = DraftRows(0, RANKS, 8, HistoryFile(tmp_path, VOCAB))
    assert not nothing.num_bytes and not nothing.salt
    # Or its ranks would draw the numbers of the first engine, and what came of them be a draft.
    assert second.salt and not first.salt


def test_an_id_that_comes_again_has_no_rows_of_the_request_before() -> None:
    rows, ranks = rows_for(), [Shelf() for _ in range(RANKS)]

    def step(name: str, *of: int) -> None:
        scheduled = SimpleNamespace(num_scheduled_tokens={name: 1})
        if (update := rows.update(scheduled, [name], of)) is not None:
            for rank in of:
                ranks[rank].take(update)

    end(rows, arrive(rows, new_request("first")), 1, 2, 3)
    again = arrive(rows, new_request("a"))
    step("a", 0, 1)
    end(rows, again, reason=FinishReason.ABORT)
    arrive(rows, new_request("a", seed=1))
    step("a", 0)
    assert not ranks[0].ids_of("a")
    rows.switched(switch_report(1.0))
    step("a", 0, 1)
    assert not ranks[1].ids_of("a")


def test_an_engine_that_begins_with_responses_samples_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than the one that gave them: or they would come again, and be their own drafts."""
    kept = DraftRows(1 << 20, RANKS, 8, HistoryFile(tmp_path, VOCAB))
    end(kept, arrive(kept, new_request("a")), 1, 2, 3)
    kept.close()
    reseed = Mock()
    monkeypatch.setattr(without_workers.EXECUTOR, "reseed", reseed)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    for state_dir in (None, tmp_path):
        assert not reseed.called
        config, stock = without_workers.engine_config(
            1, num_blocks=80, state_dir=state_dir, speculative_config=drafts
        )
        PATScheduler(vllm_config=config, **stock)
    (salt,) = reseed.call_args.args

    worker: Any = SimpleNamespace(_seed=5, rank=1, _active=SimpleNamespace(layout=Layout.of(1, 2)))
    drawn = []
    for new_salt in (0, salt, salt + 1):
        PATWorkerMixin.pat_reseed(worker, new_salt)
        assert worker._salt == new_salt
        drawn.append(torch.rand(()).item())
    assert len({*drawn}) == 3
