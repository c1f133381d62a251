"""Reads a Python package's source by `ast`: what a name stands for, without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tests.contract.signature import FunctionNode, Signature

_MADE_FROM_FIELDS = ("dataclass", "config", "BaseModel", "Struct", "NamedTuple")
"""Decorators and bases that make a constructor of a class's annotated names."""


@dataclass(frozen=True)
class Value:
    """A name that is neither a class nor a function; `kind`: the class of its value, if known."""

    kind: Class | None = None


@dataclass(frozen=True)
class Function:
    """A function, or a method as seen from an instance.

    Attributes:
        is_property: an attribute access calls it.
        bound: its first parameter is given already.
        needs_instance: the class itself does not have it ready to be called.
    """

    node: FunctionNode
    is_property: bool = False
    bound: bool = False
    needs_instance: bool = False

    @property
    def signature(self) -> Signature:
        return Signature.of(self.node, self.bound)

    @property
    def is_abstract(self) -> bool:
        return any(_last_name(d) == "abstractmethod" for d in self.node.decorator_list)


@dataclass(frozen=True, eq=False)
class Class:
    """A class of the package."""

    node: ast.ClassDef
    module: Module

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    @property
    def bases(self) -> list[Class]:
        """Those of the package."""
        found = [self.module.evaluate(_without_subscript(base)) for base in self.node.bases]
        return [base for base in found if isinstance(base, Class)]

    @cached_property
    def mro(self) -> list[Class]:
        """This class and its bases, nearest first, each once."""
        order: dict[str, Class] = {self.name: self}
        for base in self.bases:
            for one in base.mro:
                order.pop(one.name, None)
                order[one.name] = one
        return list(order.values())

    @cached_property
    def own(self) -> dict[str, Definition]:
        """What the class's own body defines, and what its methods assign to `self`."""
        return _members(self)

    def find(self, name: str) -> Definition | None:
        """What instances have under a name."""
        return next((one.own[name] for one in self.mro if name in one.own), None)

    @property
    def fields(self) -> dict[str, ast.AnnAssign]:
        """Annotated names, those of base classes first."""
        return {
            item.target.id: item
            for one in reversed(self.mro)
            for item in one.node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and not ast.unparse(item.annotation).startswith(("ClassVar", "InitVar"))
        }

    @property
    def constructor(self) -> Signature:
        """The signature of a call of the class."""
        for one in self.mro:
            own = one.own.get("__init__")
            if isinstance(own, Function):
                return own.signature
            made_by = {_last_name(d) for d in (*one.node.decorator_list, *one.node.bases)}
            if made_by & set(_MADE_FROM_FIELDS):
                return one._of_fields()
        return Signature(star=True, double_star=True)  # of a base that is not the package's

    def _of_fields(self) -> Signature:
        positional: list[str] = []
        keyword_only: list[str] = []
        required: set[str] = set()
        for name, item in self.fields.items():
            options = _field_options(item.value)
            if options.get("init") is False:
                continue
            (keyword_only if options.get("kw_only") else positional).append(name)
            if not _has_default(item.value):
                required.add(name)
        return Signature(tuple(positional), tuple(keyword_only), frozenset(required))


@dataclass(frozen=True, eq=False)
class Module:
    """A module of the package."""

    name: str
    path: Path
    tree: ast.Module
    package: Package
    _found: dict[str, Definition | None] = field(default_factory=dict, repr=False)

    @cached_property
    def bindings(self) -> dict[str, ast.stmt]:
        """The statement that gives each top-level name its meaning."""
        return {name: node for node in _statements(self.tree.body) for name in _bound_names(node)}

    def find(self, name: str) -> Definition | None:
        """What a name stands for at the module's top level, a submodule included."""
        if name not in self._found:
            node = self.bindings.get(name)
            if node is None:
                self._found[name] = self.package.module(f"{self.name}.{name}")
            else:
                self._found[name] = self._define(node, name)
        return self._found[name]

    def _define(self, node: ast.stmt, name: str) -> Definition | None:
        match node:
            case ast.ClassDef():
                return Class(node, self)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return Function(node)
            case ast.ImportFrom():
                return self._imported(node, name)
            case ast.AnnAssign():
                return Value(self._instance_of(node.annotation))
            case ast.Assign(value=ast.Call(func=func)):
                made = self.evaluate(func)
                return Value(made if isinstance(made, Class) else None)
        return Value()

    def _imported(self, node: ast.ImportFrom, name: str) -> Definition | None:
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        source = node.module or ""
        if node.level:
            is_package = self.path.name == "__init__.py"
            parts = self.name.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            source = ".".join([*parts, source] if source else parts)
        if source.split(".")[0] != self.package.name:
            return Value()
        found = self.package.module(source)
        return found.find(original) if found is not None else None

    def _instance_of(self, annotation: ast.expr) -> Class | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):  # X | None
            annotation = annotation.left
        found = self.evaluate(annotation)
        return found if isinstance(found, Class) else None

    def evaluate(self, expression: ast.expr) -> Definition | None:
        """What a dotted name stands for in this module, if it is the package's."""
        if isinstance(expression, ast.Name):
            return self.find(expression.id)
        if isinstance(expression, ast.Attribute):
            return member(self.evaluate(expression.value), expression.attr)
        return None


Definition = Module | Class | Function | Value


def member(owner: Definition | None, name: str) -> Definition | None:
    """What `owner.name` stands for; a `Value` where the owner's class is not known."""
    match owner:
        case Module() | Class():
            return owner.find(name)
        case Value(kind=Class() as kind):
            return kind.find(name)
        case Value() | Function():
            return Value()
    return None


@dataclass(frozen=True, eq=False)
class Package:
    """A package's source. Modules are read when they are asked for.

    Attributes:
        roots: folders that hold the package's folder; a module is taken from the first that has it.
        label: for messages: name and version.
    """

    name: str
    label: str
    roots: tuple[Path, ...]
    _modules: dict[str, Module | None] = field(default_factory=dict, repr=False)

    def module(self, name: str) -> Module | None:
        """A module by its dotted name."""
        if name not in self._modules:
            path = next(filter(Path.is_file, self._paths(name)), None)
            self._modules[name] = None if path is None else Module(name, path, _parse(path), self)
        return self._modules[name]

    def _paths(self, name: str) -> Iterator[Path]:
        for root in self.roots:
            folder = root.joinpath(*name.split("."))
            yield folder.with_name(f"{folder.name}.py")
            yield folder / "__init__.py"

    def find(self, dotted: str) -> Definition | None:
        """What a dotted name stands for: a module, or something in one."""
        if (module := self.module(dotted)) is not None:
            return module
        owner, _, name = dotted.rpartition(".")
        return member(self.find(owner), name) if owner else None


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _members(cls: Class) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in _statements(cls.node.body):
        if isinstance(node, FunctionNode):
            for name in _assigned_to_self(node):
                found.setdefault(name, Value())
    for node in _statements(cls.node.body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                decorators = {_last_name(d) for d in node.decorator_list}
                found[name] = Function(
                    node,
                    is_property=bool(decorators & {"property", "cached_property", "setter"}),
                    bound="staticmethod" not in decorators,
                    needs_instance=not decorators & {"staticmethod", "classmethod"},
                )
            case ast.ClassDef(name=name):
                found[name] = Class(node, cls.module)
            case _:
                found |= {name: Value() for name in _bound_names(node)}
    return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the blocks in it, functions and classes left closed."""
    for node in body:
        if isinstance(node, FunctionNode) and any(
            _last_name(d) == "overload" for d in node.decorator_list
        ):
            continue
        yield node
        if not isinstance(node, FunctionNode | ast.ClassDef):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound_names(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Import(names=names):
            return [(a.asname or a.name).split(".")[0] for a in names]
        case ast.ImportFrom(names=names):
            return [a.asname or a.name for a in names]
        case ast.Assign(targets=targets):
            return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


@cache
def _assigned_to_self(function: FunctionNode) -> tuple[str, ...]:
    return tuple(
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, `c(...)` and `c[...]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "attr", getattr(node, "id", ""))


def _without_subscript(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node


def _field_options(value: ast.expr | None) -> dict[str, Any]:
    """Keywords of `field(...)`; `...` for those that are no constants."""
    if not isinstance(value, ast.Call) or _last_name(value) not in ("field", "Field"):
        return {}
    options = {k.arg: getattr(k.value, "value", ...) for k in value.keywords if k.arg}
    return {**options, **({"default": ...} if value.args else {})}


def _has_default(value: ast.expr | None) -> bool:
    options = _field_options(value)
    return value is not None and (
        not options or bool({"default", "default_factory"} & set(options))
    )
