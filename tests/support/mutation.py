"""Mistakes made on purpose, to show that a check would see them."""

import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

OUTER = "__mutated__"


def _plain(function: Any) -> FunctionType:
    """The function behind a property, a class method or a decorator that sets `__wrapped__`."""
    if isinstance(function, property):
        function = function.fget
    function = inspect.unwrap(getattr(function, "__func__", function))
    assert isinstance(function, FunctionType), f"{function!r} has no Python source"
    return function


def _changed(function: FunctionType, changes: dict[str, str]) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes.items():
        count = source.count(old)
        assert count == 1, f"{old!r} occurs {count} times in {function.__qualname__}, not once"
        source = source.replace(old, new)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    definition.decorator_list = []
    # Free variables, `__class__` of `super()` among them, need a scope around the definition.
    free = "; ".join(f"{name} = None" for name in function.__code__.co_freevars) or "pass"
    outer = ast.parse(f"def {OUTER}():\n {free}\n return {function.__name__}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(-1, definition)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    scope: dict[str, Any] = {}
    # What annotations name may be imported for type checkers only.
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    exec(
        compile(module, f"<mutation of {function.__qualname__}>", "exec", flags),
        function.__globals__,
        scope,
    )
    changed: FunctionType = scope[OUTER]()
    code = changed.__code__
    assert code.co_freevars == function.__code__.co_freevars, (
        "a mutation may not change what is captured"
    )
    return code


@contextmanager
def mutated(function: Callable[..., Any] | property, changes: dict[str, str]) -> Iterator[None]:
    """Replace parts of a function's source, wherever the function is referenced, in this process.

    Args:
        function: a function, method or property, not a builtin.
        changes: what replaces what. Each key must occur once in the source.

    Raises:
        AssertionError: a key does not occur exactly once: the mutation is out of date.
    """
    plain = _plain(function)
    original = plain.__code__
    plain.__code__ = _changed(plain, changes)
    try:
        yield
    finally:
        plain.__code__ = original
