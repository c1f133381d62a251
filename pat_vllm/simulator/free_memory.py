"""Free KV memory of a simulated replica, and what requests have left in it. Pure."""

from __future__ import annotations

from collections import OrderedDict


class FreeMemory:
    """As vLLM's prefix cache keeps it: what was freed first is overwritten first, and of a request
    its last tokens first.

    Attributes:
        total: tokens whose KV is free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._freed: OrderedDict[object, int] = OrderedDict({object(): total})  # the oldest first

    def free(self, tokens: int, owner: int | None = None) -> None:
        """A request does not hold these tokens any more; `owner` names it if it is to come back, or
        may be continued."""
        self.total += tokens
        self._freed[object() if owner is None else owner] = tokens

    def overwrite(self, tokens: int) -> None:
        """Requests hold so many tokens more."""
        self.total -= tokens
        while tokens > 0 and self._freed:
            oldest, left = next(iter(self._freed.items()))
            if left > tokens:
                self._freed[oldest] = left - tokens
            else:
                del self._freed[oldest]
            tokens -= left

    def left_by(self, owner: int) -> int:
        """Tokens of a request whose KV is still there."""
        return self._freed.get(owner, 0)

    @property
    def owners(self) -> list[int]:
        """Requests of which something is still there."""
        return [owner for owner in self._freed if isinstance(owner, int)]

    def take_back(self, owner: int) -> int:
        """A request comes back, or is continued: the tokens whose KV is still there, and is held
        again."""
        tokens = self._freed.pop(owner, 0)
        self.total -= tokens
        return tokens
