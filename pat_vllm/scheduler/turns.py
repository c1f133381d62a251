"""Which requests are the turns of one trajectory. Pure.

An agent's rollout is several requests: each one's prompt is what the one before it held, its
response included, and what a tool or a user said to that. A request is taken for the next turn of
an ended one where its prompt begins with the tokens of that one, but for the last token, which
chat templates may leave out or replace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pat_vllm.predictor.state import REMEMBERED_TURNS, Turn


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that may be continued, with its tokens behind the last whole block."""

    turn: Turn
    num_tokens: int
    tail: tuple[int, ...]


class Turns:
    """Finds the turn before each request among those that have ended."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a block of which there is a hash."""
        self._block_size = block_size
        # By the hash of the last whole block: equal hashes mean equal tokens up to there.
        self._ended: OrderedDict[Hashable, list[_Ended]] = OrderedDict()
        self._count = 0
        self._trajectories = 0

    def arrived(self, tokens: Sequence[int], blocks: Sequence[Hashable]) -> Turn:
        """The place of a new request in its trajectory.

        Args:
            tokens: of its prompt.
            blocks: hashes of the prompt's whole blocks, the first one first.
        """
        for count in range(len(blocks), 0, -1):
            begin = count * self._block_size
            for ended in self._ended.get(blocks[count - 1], ()):
                if tuple(tokens[begin : begin + len(ended.tail)]) == ended.tail:
                    self._forget(blocks[count - 1], ended)
                    return Turn(ended.turn.trajectory, ended.turn.index + 1, ended.num_tokens)
        self._trajectories += 1
        return Turn(self._trajectories, 0, 0)

    def ended(
        self, turn: Turn, num_prompt_tokens: int, tokens: Sequence[int], blocks: Sequence[Hashable]
    ) -> None:
        """A request has ended.

        Args:
            tokens: of its prompt and its response.
            blocks: hashes of their whole blocks, as many as there are.
        """
        certain = len(tokens) - 1
        count = min(len(blocks), certain // self._block_size)
        if not count or certain <= num_prompt_tokens:
            return  # its next turn could be another sample of its prompt
        tail = tuple(tokens[count * self._block_size : certain])
        self._ended.setdefault(blocks[count - 1], []).append(_Ended(turn, len(tokens), tail))
        self._count += 1
        while self._count > REMEMBERED_TURNS:
            block, oldest = next(iter(self._ended.items()))
            self._forget(block, oldest[0])

    def _forget(self, block: Hashable, ended: _Ended) -> None:
        self._ended[block].remove(ended)
        self._count -= 1
        if not self._ended[block]:
            del self._ended[block]
