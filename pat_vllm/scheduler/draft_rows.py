"""Earlier responses for the drafters: which request may look into which, and who has to know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingType
from vllm.v1.engine import FinishReason

from pat_vllm.drafts.corpus import Corpus, Key, Row, key_of
from pat_vllm.drafts.history_file import HistoryFile
from pat_vllm.drafts.shelf import RowUpdate, Shelf
from pat_vllm.predictor.state import REMEMBERED_TURNS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pat_vllm.predictor.state import Turn

MOST_TOKENS = 1 << 17
"""Of the rows of a request: eight responses of 16K tokens."""

_MOST_TOKENS_OF_ALL = 1 << 24
"""Of the rows of a replica's requests, if no two have a prompt in common."""


class DraftRows:
    """Gives each request the earlier responses to its prompt, and the siblings' that end while it
    runs.

    A turn of a conversation goes by the prompt of the first turn. A request that samples with a
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
        self._keys: dict[str, Key] = {}
        self._rows: dict[str, tuple[Row, ...]] = {}
        self._siblings: dict[Key, set[str]] = {}
        self._changed: set[str] = set()
        self._id_again: set[str] = set()
        self._of_trajectory: OrderedDict[int, Key] = OrderedDict()
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

    def arrived(self, request: Request, turn: Turn) -> None:
        """A request has come."""
        prompt, params = request.prompt_token_ids, request.sampling_params
        if not self._max_bytes or params is None or not prompt:
            return
        key = self._of_trajectory.get(turn.trajectory) if turn.index else None
        if key is None:
            key = key_of(prompt, request.cache_salt)
            self._of_trajectory[turn.trajectory] = key
            if len(self._of_trajectory) > REMEMBERED_TURNS:
                self._of_trajectory.popitem(last=False)
        self._keys[request.request_id] = key
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

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request has ended; what it generated is kept unless it was aborted."""
        if (key := self._keys.pop(request.request_id, None)) is None:
            return
        self._rows.pop(request.request_id, None)
        self._changed.discard(request.request_id)
        self._id_again.discard(request.request_id)
        running = self._siblings.get(key, set())
        running.discard(request.request_id)
        if not running:
            self._siblings.pop(key, None)
        prompt, response = request.prompt_token_ids, request.output_token_ids
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and prompt and response:
            self._corpus.add(key, prompt, response)
            rows = self._latest(key) if running else ()
            for request_id in running:
                self._give(request_id, rows)

    def idle(self) -> None:
        """No request is left."""
        self._file.save(self._corpus)

    def close(self) -> None:
        """The engine ends."""
        self._file.close(self._corpus)

    def moved(self) -> None:
        """The requests are in other replicas now."""
        self._changed.update(self._rows, self._id_again)

    def update(
        self, step: SchedulerOutput, requests: Iterable[str], ranks: Sequence[int]
    ) -> RowUpdate | None:
        """What the ranks of a replica have to know before a step; None: nothing.

        Args:
            requests: ids of all requests that the replica has.
        """
        if not self._changed:
            return None
        due = self._changed.intersection(step.num_scheduled_tokens)
        if not due:
            return None
        self._changed -= due
        shelves, here = [self._shelves[rank] for rank in ranks], set(requests)
        # Siblings have the same rows.
        of_due = {request_id: self._rows.get(request_id, ()) for request_id in due}
        different = {id(rows): rows for rows in of_due.values()}
        ids = {name: tuple(row.id for row in rows) for name, rows in different.items()}
        rows = {row.id: row for request_rows in different.values() for row in request_rows}
        update = RowUpdate(
            tuple(sorted({id_ for shelf in shelves for id_ in shelf if id_ not in here})),
            {
                row.id: row.tokens
                for row in rows.values()
                if not all(row.id in shelf for shelf in shelves)
            },
            {request_id: ids[id(of_due[request_id])] for request_id in sorted(due)},
        )
        for shelf in shelves:
            shelf.take(update)
        return update
