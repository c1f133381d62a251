"""Signatures and calls, as far as their text tells."""

from __future__ import annotations

import ast
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Signature:
    """Parameters of a callable, without `self` or `cls`.

    Attributes:
        positional: names that may be given by position, in order.
        keyword_only: names that may be given by keyword only.
        required: those of both that have no default.
        star: takes any more by position.
        double_star: takes any more by keyword.
    """

    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    star: bool = False
    double_star: bool = False

    @classmethod
    def of(cls, function: FunctionNode, bound: bool) -> Signature:
        """The signature of a function; `bound`: its first parameter is given already."""
        a = function.args
        positional = [p.arg for p in (*a.posonlyargs, *a.args)]
        with_default = set(positional[len(positional) - len(a.defaults) :])
        with_default |= {
            p.arg for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default
        }
        positional = positional[bound:]
        keyword_only = tuple(p.arg for p in a.kwonlyargs)
        return cls(
            tuple(positional),
            keyword_only,
            frozenset({*positional, *keyword_only} - with_default),
            a.vararg is not None,
            a.kwarg is not None,
        )

    def why_not(self, call: Call) -> str | None:
        """What is wrong with a call; None when it is right, as far as its text tells."""
        if call.positional > len(self.positional) and not self.star:
            return f"takes {len(self.positional)} arguments by position, not {call.positional}"
        given = set(self.positional[: call.positional])
        known = {*self.positional, *self.keyword_only}
        for keyword in call.keywords:
            if keyword in given:
                return f"gets its parameter {keyword!r} twice"
            if keyword not in known and not self.double_star:
                return f"has no parameter {keyword!r}"
        missing = self.required - given - set(call.keywords)
        if missing and not call.unpacks:
            return f"needs its parameter {sorted(missing)[0]!r}"
        return None

    def why_not_in_place_of(self, other: Signature) -> str | None:
        """What calls of `other` a callable with this signature would refuse; None: none."""
        for index, name in enumerate(other.positional):
            if name in self.positional:
                if self.positional.index(name) != index:
                    return f"has its parameter {name!r} in another place"
            elif index < len(self.positional) and not self.star:
                return f"calls its parameter {name!r} {self.positional[index]!r}"
            elif not self.star and not self.double_star:
                return f"does not take the parameter {name!r}"
        for name in other.keyword_only:
            if name not in (*self.positional, *self.keyword_only) and not self.double_star:
                return f"does not take the parameter {name!r}"
        if extra := self.required - set(other.positional) - set(other.keyword_only):
            return f"needs a parameter {sorted(extra)[0]!r}, which is not given"
        if other.star and not self.star:
            return "does not take any number of arguments"
        if other.double_star and not self.double_star:
            return "does not take any keyword"
        return None


@dataclass(frozen=True)
class Call:
    """The arguments of a call; `unpacks`: with others that its text does not tell."""

    positional: int
    keywords: tuple[str, ...]
    unpacks: bool

    @classmethod
    def of(cls, call: ast.Call) -> Call:
        starred = any(isinstance(a, ast.Starred) for a in call.args)
        named = [k.arg for k in call.keywords]
        return cls(
            sum(not isinstance(a, ast.Starred) for a in call.args),
            tuple(name for name in named if name is not None),
            starred or None in named,
        )
