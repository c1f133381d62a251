"""Checks of what `names.py` and `behaviour.py` list, against vLLM's source and against ours."""

from __future__ import annotations

import ast
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from logging import Logger
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch

from tests.contract.behaviour import Replaced, Text
from tests.contract.names import NOT_VLLMS, Names
from tests.contract.own import Checked, OurModule, Subclass
from tests.contract.signature import Call, Signature
from tests.contract.source import Class, Function, Package, member

Files = Mapping[str, OurModule]
"""Our files by module name."""

_COMMON = (
    *(list, dict, set, str, bytes, int, float, type, BaseException, Counter, deque, Future),
    *(
        Logger,
        Path,
        SimpleQueue,
        Thread,
        np.ndarray,
        torch.Generator,
        torch.Tensor,
        torch.nn.Module,
    ),
)
_COMMON_NAMES = frozenset(name for cls in _COMMON for name in dir(cls))


def files_of(row: Names | Text, files: Files) -> list[OurModule]:
    """Our modules that a row names."""
    names = (n if n.startswith("pat_") else f"pat_vllm.{n}" for n in row.by.split())
    return [files[name] for name in names]


def check_listed(row: Names, files: Files, vllm: Package) -> Iterator[Checked]:
    """Every name of a row exists, and calls of it are right, wherever we use it."""
    owner = vllm.find(row.owner)
    for name in row.names.split():
        # The first place in each file.
        where = ", ".join(f.at(f.says[name][0]) for f in files_of(row, files) if f.says[name])
        full = f"{row.owner}.{name}"
        if owner is None:
            yield Checked(full, where, f"does not exist: there is no {row.owner}")
        elif row.used == "passed":
            signature = owner.constructor if isinstance(owner, Class) else Signature()
            known = (*signature.positional, *signature.keyword_only)
            problem = None if name in known else f"is not a parameter of {row.owner}"
            yield Checked(full, where, problem)
        else:
            found = member(owner, name)
            yield Checked(full, where, None if found else "does not exist")


def check_listed_calls(rows: Iterable[Names], files: Files, vllm: Package) -> Iterator[Checked]:
    """Calls `x.name(...)` fit a method that is listed under that name for that file."""
    signatures: dict[tuple[str, str], list[tuple[str, Signature]]] = {}
    for row in rows:
        if row.used != "asked":
            continue
        owner = vllm.find(row.owner)
        for name in row.names.split():
            found = member(owner, name)
            if isinstance(found, Function) and not found.is_property:
                for file in files_of(row, files):
                    listed = signatures.setdefault((file.module.name, name), [])
                    listed.append((f"{row.owner}.{name}", found.signature))
    for file in files.values():
        for node in file.nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=receiver, attr=name)):
                    listed = signatures.get((file.module.name, name), [])
                    if listed and ast.unparse(receiver) not in ("self", "super()"):
                        call = Call.of(node)
                        problems = [signature.why_not(call) for _, signature in listed]
                        problem = problems[0] if all(problems) else None
                        yield Checked(f"{listed[0][0]}(...)", file.at(node), problem)


def check_text(row: Text, files: Files, vllm: Package) -> Checked:
    """vLLM's source still has what a row's pattern describes."""
    where = ", ".join(f.path for f in files_of(row, files))
    found = vllm.find(row.owner)
    if not isinstance(found, Class | Function):
        return Checked(row.owner, where, f"does not exist ({row.why})")
    problem = None
    if not re.search(row.pattern, ast.unparse(found.node)):
        problem = f"does not contain {row.pattern!r} any more ({row.why})"
    return Checked(row.owner, where, problem)


def check_replaced(row: Replaced, subs: Sequence[Subclass], vllm: Package) -> Iterator[Checked]:
    """Whatever vLLM's code asks our object for, it has, and takes the arguments that it gets."""
    (sub,) = (s for s in subs if f"{s.file.module.name}.{s.node.name}" == row.ours)
    for user in row.users:
        cls = vllm.find(user)
        if not isinstance(cls, Class):
            yield Checked(user, sub.file.at(sub.node), "does not exist")
            continue
        calls = {id(n.func): n for n in ast.walk(cls.node) if isinstance(n, ast.Call)}
        for node in ast.walk(cls.node):
            match node:
                case ast.Attribute(value=receiver, attr=name) if (
                    ast.unparse(receiver) == row.expression
                ):
                    problem = _refused(sub, vllm, name, calls.get(id(node)))
                    yield Checked(
                        f"{user}: {row.expression}.{name}", sub.file.at(sub.node), problem
                    )


def _refused(sub: Subclass, vllm: Package, name: str, call: ast.Call | None) -> str | None:
    if name in sub.defined:
        _, node = sub.defined[name]
        if call is None or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        why = Signature.of(node, bound=True).why_not(Call.of(call))
        return f"is called, but {sub.node.name}.{name} {why}" if why else None
    if name in sub.assigned or sub.find(vllm, name):
        return None
    return f"is asked for, but {sub.node.name} has no such name"


def stale(row: Names, files: Files) -> Iterator[str]:
    """What a row lists in vain: names that its modules do not use, modules that use none of it."""
    names = row.names.split()
    for name in names:
        if not any(file.says[name] for file in files_of(row, files)):
            yield f"{row.owner}: {name} is not used in {row.by}"
    for file in files_of(row, files):
        if not any(file.says[name] for name in names):
            yield f"{row.owner}: nothing of it is used in {file.module.name}"


def unlisted(files: Files, rows: Iterable[Names | Text], vllm: Package) -> Iterator[str]:
    """Attributes of objects, in our modules that use vLLM, for which nothing here accounts.

    Known are: ours, those of names imported from elsewhere, those of common types, and those that
    `names.py` lists for the module. So a name of vLLM's that is also ours is not missed here. What
    `self` is asked for is checked with its class.
    """
    ours = _defined_by_us(files.values())
    listed: dict[str, set[str]] = {}
    for row in rows:
        names = row.names.split() if isinstance(row, Names) else re.findall(r"\w+", row.pattern)
        for file in files_of(row, files):
            listed.setdefault(file.module.name, set()).update(names)
    for name, file in files.items():
        if not (file.imports or name in listed) or name.startswith("pat_vllm.cli"):
            continue
        known = ours | _COMMON_NAMES | NOT_VLLMS | listed.get(name, set())
        others = _imported_from_elsewhere(file)
        for node in file.nodes:
            if (
                isinstance(node, ast.Attribute)
                and node.attr not in known
                and _root(node) not in others
                and file.evaluate(node.value, vllm) is None
                and ast.unparse(node.value) not in ("self", "super()")
            ):
                yield f"{file.at(node)}: {ast.unparse(node)}"


def _defined_by_us(files: Iterable[OurModule]) -> frozenset[str]:
    found: set[str] = set()
    for file in files:
        for node in file.nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.ClassDef(name=name):
                    found.add(name)
                    found |= {
                        item.target.id
                        for item in node.body
                        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                    }
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) if name.startswith("_pat_"):
                    found.add(name)
    return frozenset(found)


def _imported_from_elsewhere(file: OurModule) -> set[str]:
    return {
        (a.asname or a.name).split(".")[0]
        for node in file.nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for a in node.names
    } - set(file.imports)


def _root(node: ast.expr) -> str | None:
    while True:
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case ast.Name(id=name):
                return name
            case _:
                return None
