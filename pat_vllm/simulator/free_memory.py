"""Free KV memory of a simulated replica, and what requests have left in it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Freed:
    tokens: int
    owner: int | None = None


@dataclass(slots=True)
class FreeMemory:
    """As vLLM's prefix cache keeps it: what was freed first is overwritten first, and of a request
    its last tokens first.

    Attributes:
        total: tokens whose KV is free.
    """

    total: int
    _freed: deque[_Freed] = field(init=False)
    _left: dict[int, _Freed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._freed = deque([_Freed(self.total)])

    def free(self, tokens: int, owner: int | None = None) -> None:
        """A request does not hold these tokens any more; `owner` names it if it is to come back, or
        may be continued."""
        self.total += tokens
        if owner is None and self._freed and self._freed[-1].owner is None:
            self._freed[-1].tokens += tokens
            return
        freed = _Freed(tokens, owner)
        self._freed.append(freed)
        if owner is not None:
            self._left[owner] = freed

    def overwrite(self, tokens: int) -> None:
        """Requests hold so many tokens more."""
        self.total -= tokens
        while tokens > 0 and self._freed:
            oldest = self._freed[0]
            taken = min(tokens, oldest.tokens)
            oldest.tokens -= taken
            tokens -= taken
            if oldest.tokens <= 0:
                self._freed.popleft()
                if oldest.owner is not None:
                    self._left.pop(oldest.owner, None)

    def left_by(self, owner: int) -> int:
        """Tokens of a request whose KV is still there."""
        freed = self._left.get(owner)
        return freed.tokens if freed is not None else 0

    @property
    def owners(self) -> list[int]:
        """Requests of which something is still there."""
        return list(self._left)

    def take_back(self, owner: int) -> int:
        """A request comes back, or is continued: the tokens whose KV is still there, and is held
        again."""
        freed = self._left.pop(owner, None)
        if freed is None:
            return 0
        tokens, freed.tokens, freed.owner = freed.tokens, 0, None
        self.total -= tokens
        return tokens
