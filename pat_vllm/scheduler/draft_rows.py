"""Earlier responses for the drafters: which request may look into which, and who has to know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.sampling_params import SamplingType
from vllm.v1.engine import FinishReason

from pat_vllm.drafts.corpus import Corpus, Key, Row, key_of
from pat_vllm.drafts.history_file import HistoryFile
from pat_vllm.drafts.shelf import RowUpdate, Shelf
from pat_vllm.reporting.listener import EngineListener

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pat_vllm.reporting import BatchReport, SwitchReport

MOST_TOKENS = 1 << 17
"""Tokens of earlier responses that a request may draft from: eight responses of 16K tokens."""
_MOST_TOKENS_OF_ALL = 1 << 24
"""Tokens of earlier responses that the requests of a replica may draft from together, if no two
have a prompt in common: 64 MiB on each rank."""
_REMEMBERED_ENDS = 65_536
"""Ended requests whose next turns are recognized; the ones that ended first are forgotten first."""


class _Prompt(NamedTuple):
    """What a request's prompt is known by, and how many blocks it has."""

    key: Key
    num_blocks: int


class DraftRows(EngineListener):
    """Gives each request the earlier responses to its prompt, and the siblings' that end while it
    runs.

    A turn of a conversation goes by the prompt of the first turn: its own prompt has blocks that an
    ended request generated. A request that samples with a
    seed gets none: its random numbers are a function of seed and position, so that the response it
    gave to the same prompt before is no independent guess, and the law of its tokens would change.

    Attributes:
        salt: of an engine that begins with the responses of another, a number for the ranks' seeds:
            with equal ones responses would come again, and be their own drafts. 0: it does not.
    """

    def __init__(
        self, max_bytes: int, num_ranks: int, max_num_seqs: int, file: HistoryFile | None = None
    ) -> None:
        """With the responses of the file, if there is one.

        Args:
            max_bytes: of those that are kept; 0: none are.
            max_num_seqs: requests of the largest replica.
            file: where responses are kept for the next engine.
        """
        self._max_bytes = max_bytes
        self._corpus = Corpus(max_bytes)
        self._file = file or HistoryFile(None, 0)
        self.salt = self._file.load(self._corpus) if max_bytes else 0
        self._most_tokens = min(MOST_TOKENS, _MOST_TOKENS_OF_ALL // max_num_seqs)
        self._shelves = [Shelf() for _ in range(num_ranks)]
        self._prompts: dict[str, _Prompt] = {}
        self._rows: dict[str, tuple[Row, ...]] = {}
        self._siblings: dict[Key, set[str]] = {}
        self._changed: set[str] = set()
        self._id_again: set[str] = set()
        self._continued: OrderedDict[Hashable, Key] = OrderedDict()
        """By the hash of the last block that an ended request generated: its prompt."""
        self._found: dict[Key, tuple[Row, ...]] = {}
        self._found_at = 0

    @property
    def num_bytes(self) -> int:
        """Of all responses that are kept."""
        return self._corpus.num_bytes

    @property
    def repeated(self) -> Collection[str]:
        """Requests to whose prompt there are earlier responses."""
        return self._rows.keys()

    def add(self, request: Request) -> None:
        """Look for earlier responses to the prompt of a request that has come."""
        prompt, params = request.prompt_token_ids, request.sampling_params
        if not self._max_bytes or params is None or not prompt:
            return
        first_turns = filter(None, map(self._continued.get, reversed(request.block_hashes)))
        key = next(first_turns, None) or key_of(prompt, request.cache_salt)
        self._prompts[request.request_id] = _Prompt(key, len(request.block_hashes))
        if any(shelf.ids_of(request.request_id) for shelf in self._shelves):
            # vLLM can be told to keep the ids that clients choose, and they may come again.
            self._id_again.add(request.request_id)
            self._changed.add(request.request_id)
        if params.sampling_type != SamplingType.RANDOM_SEED:
            self._siblings.setdefault(key, set()).add(request.request_id)
            self._give(request.request_id, self._latest(key))

    def _latest(self, key: Key) -> tuple[Row, ...]:
        """The same tuple for all siblings."""
        if self._found_at != self._corpus.num_added:
            self._found_at = self._corpus.num_added
            self._found.clear()
        rows = self._found.get(key) or self._corpus.latest(key, self._most_tokens)
        if rows:  # none are to most prompts
            self._found[key] = rows
        return rows

    def _give(self, request_id: str, rows: tuple[Row, ...]) -> None:
        if rows:
            self._rows[request_id] = rows
            self._changed.add(request_id)

    def remove(self, request: Request, reason: FinishReason) -> None:
        """Keep what a request that has ended generated, unless it was aborted."""
        if (known := self._prompts.pop(request.request_id, None)) is None:
            return
        key = known.key
        self._rows.pop(request.request_id, None)
        self._changed.discard(request.request_id)
        self._id_again.discard(request.request_id)
        running = self._siblings.get(key, set())
        running.discard(request.request_id)
        if not running:
            self._siblings.pop(key, None)
        # Chat templates may replace the last token of a response, and with it its last block.
        for block_hash in request.block_hashes[known.num_blocks :][-2:]:
            self._continued[block_hash] = key
        while len(self._continued) > _REMEMBERED_ENDS:
            self._continued.popitem(last=False)
        prompt, response = request.prompt_token_ids, request.output_token_ids
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and prompt and response:
            self._corpus.add(key, prompt, response)
            rows = self._latest(key) if running else ()
            for request_id in running:
                self._give(request_id, rows)

    def batch_over(self, now: float, batch: BatchReport | None = None) -> None:
        # Keep the responses for the next engine.
        self._file.save(self._corpus)

    def close(self) -> None:
        """The engine ends."""
        self._file.close(self._corpus)

    def switched(self, report: SwitchReport) -> None:
        # The requests are in other replicas now.
        self._changed.update(self._rows, self._id_again)

    def update(
        self, step: SchedulerOutput, requests: Iterable[str], ranks: Sequence[int]
    ) -> RowUpdate | None:
        """What the ranks of a replica have to know before a step; None: nothing.

        Args:
            requests: ids of all requests that the replica has.
        """
        due = self._changed.intersection(step.num_scheduled_tokens)
        if not due:
            return None
        self._changed -= due
        rows_of = {request_id: self._rows.get(request_id, ()) for request_id in sorted(due)}
        # Siblings share one tuple of rows, which may be long. So each tuple is looked at once.
        distinct = {id(rows): rows for rows in rows_of.values()}
        ids = {name: tuple(row.id for row in rows) for name, rows in distinct.items()}
        shelves, here = [self._shelves[rank] for rank in ranks], set(requests)
        update = RowUpdate(
            forgotten=tuple(sorted({known for shelf in shelves for known in shelf} - here)),
            rows={
                row.id: row.tokens
                for rows in distinct.values()
                for row in rows
                if not all(row.id in shelf for shelf in shelves)
            },
            of_requests={request_id: ids[id(rows)] for request_id, rows in rows_of.items()},
        )
        for shelf in shelves:
            shelf.take(update)
        return update
