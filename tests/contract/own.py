"""What our own source uses of vLLM, found in it by `ast`, and whether a vLLM has it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.contract.signature import Call, FunctionNode, Signature
from tests.contract.source import Class, Definition, Function, Module, Package, Value, member

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "pat_vllm": ROOT,
    "pat_verl": ROOT / "integrations" / "verl",
    "pat_openrlhf": ROOT / "integrations" / "openrlhf",
}


@dataclass(frozen=True)
class Checked:
    """Something of vLLM's that we use.

    Attributes:
        name: what, dotted.
        where: who of us uses it, as file:line.
        problem: why that does not work with the vLLM looked at, or None.
    """

    name: str
    where: str
    problem: str | None


@dataclass(frozen=True, eq=False)
class OurModule:
    """One of our files."""

    module: Module

    @property
    def path(self) -> str:
        """Relative to the repository."""
        return self.module.path.relative_to(ROOT).as_posix()

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.module.tree))

    @cached_property
    def says(self) -> Mapping[str, list[ast.AST]]:
        """Where a name stands: as an attribute, a keyword, a parameter or a string."""
        found: dict[str, list[ast.AST]] = defaultdict(list)
        for node in self.nodes:
            match node:
                case ast.Attribute(attr=str(name)) | ast.keyword(arg=str(name)):
                    found[name].append(node)
                case ast.arg(arg=name) | ast.Constant(value=str(name)):
                    found[name].append(node)
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, ast.AST]]:
        """vLLM's dotted name behind each local one, and the import; those in functions, too."""
        found: dict[str, tuple[str, ast.AST]] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and _is_vllm(node.module):
                for a in node.names:
                    found[a.asname or a.name] = (f"{node.module}.{a.name}", node)
            elif isinstance(node, ast.Import):
                for a in node.names:
                    if _is_vllm(a.name):
                        found[a.asname or a.name] = (a.name, node)
        return found

    def evaluate(self, expression: ast.expr, vllm: Package) -> Definition | None:
        """What a dotted name of this file is in vLLM; None if it is not vLLM's."""
        match expression:
            case ast.Name(id=name) if name in self.imports:
                return vllm.find(self.imports[name][0])
            case ast.Attribute(value=owner, attr=name):
                return member(self.evaluate(owner, vllm), name)
        return None


def our_modules() -> list[OurModule]:
    """Every file of ours."""
    found = []
    for name, root in PACKAGES.items():
        package = Package(name, name, (root,))
        for path in sorted((root / name).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = package.module(".".join(p for p in parts if p != "__init__"))
            assert module is not None
            found.append(OurModule(module))
    return found


def check_names(file: OurModule, vllm: Package) -> Iterator[Checked]:
    """Names imported from vLLM, attributes of these, and dotted names in strings."""
    for dotted, node in file.imports.values():
        yield Checked(dotted, file.at(node), None if vllm.find(dotted) else "does not exist")
    for node in file.nodes:
        match node:
            case ast.Attribute(value=owner, attr=name):
                found = file.evaluate(owner, vllm)
                if isinstance(found, Module | Class | Value) and found != Value():
                    problem = None if member(found, name) else "does not exist"
                    yield Checked(f"{_name_of(found)}.{name}", file.at(node), problem)
            case ast.Constant(value=str(text)) if re.fullmatch(r"vllm(\.\w+)*\.[A-Z]\w+", text):
                yield Checked(text, file.at(node), None if vllm.find(text) else "does not exist")


def check_calls(file: OurModule, vllm: Package) -> Iterator[Checked]:
    """Calls of imported functions and classes, and of their attributes."""
    for node in file.nodes:
        if not isinstance(node, ast.Call):
            continue
        signature: Signature | None = None
        match file.evaluate(node.func, vllm):
            case Class() as cls:
                signature = cls.constructor
            case Function() as function if not _of_class(node.func, function, file, vllm):
                signature = function.signature
        if signature is not None:
            problem = signature.why_not(Call.of(node))
            yield Checked(f"{ast.unparse(node.func)}(...)", file.at(node), problem)


def _of_class(func: ast.expr, function: Function, file: OurModule, vllm: Package) -> bool:
    """Whether a method is called on its class, with the instance as an argument."""
    return (
        function.needs_instance
        and isinstance(func, ast.Attribute)
        and isinstance(file.evaluate(func.value, vllm), Class)
    )


# -------------------------------------------------------------------- classes


@dataclass(frozen=True)
class Subclass:
    """A class of ours with bases of vLLM's, and its ancestors that are ours, nearest first."""

    file: OurModule
    node: ast.ClassDef
    ours: tuple[tuple[OurModule, ast.ClassDef], ...]
    bases: tuple[str, ...]

    @cached_property
    def defined(self) -> dict[str, tuple[OurModule, ast.AST]]:
        """Names that we give a meaning, and where; not those only annotated."""
        found: dict[str, tuple[OurModule, ast.AST]] = {}
        for file, node in self.ours:
            for item in node.body:
                match item:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        found.setdefault(name, (file, item))
                    case ast.Assign(targets=[ast.Name(id=name)]):
                        found.setdefault(name, (file, item))
                    case ast.AnnAssign(target=ast.Name(id=name), value=value) if value:
                        found.setdefault(name, (file, item))
        return found

    @cached_property
    def assigned(self) -> set[str]:
        """Names that our methods assign to `self`."""
        return {
            n.attr
            for _, node in self.ours
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and _is_self(n.value)
        }

    def stock(self, vllm: Package) -> list[Class]:
        """vLLM's classes behind it, nearest first."""
        found = [vllm.find(base) for base in self.bases]
        return [one for cls in found if isinstance(cls, Class) for one in cls.mro]

    def find(self, vllm: Package, name: str) -> tuple[Class, Definition] | None:
        """What vLLM's classes have under a name."""
        return next(((cls, cls.own[name]) for cls in self.stock(vllm) if name in cls.own), None)

    def overrides(self, vllm: Package) -> set[str]:
        """Names that we give another meaning than vLLM."""
        return {name for name in self.defined if self.find(vllm, name)}


def subclasses(files: Sequence[OurModule]) -> list[Subclass]:
    """All of our classes that have a base of vLLM's."""
    by_name = {
        (file.module.name, node.name): (file, node)
        for file in files
        for node in file.module.tree.body
        if isinstance(node, ast.ClassDef)
    }

    def ancestors(file: OurModule, node: ast.ClassDef) -> list[tuple[OurModule, ast.ClassDef]]:
        found = [(file, node)]
        for base in node.bases:
            if isinstance(base, ast.Name):
                own = file.module.find(base.id)
                if isinstance(own, Class):
                    found += ancestors(*by_name[own.module.name, own.node.name])
        return found

    result = []
    for file, node in by_name.values():
        named = (b.id for b in node.bases if isinstance(b, ast.Name))
        bases = [file.imports[name][0] for name in named if name in file.imports]
        if bases:
            result.append(Subclass(file, node, tuple(ancestors(file, node)), tuple(bases)))
    return result


def check_subclass(sub: Subclass, vllm: Package, overrides: set[str]) -> Iterator[Checked]:
    """Overrides, abstract methods, and what `self` and `super()` are asked for.

    Args:
        overrides: names that vLLM's classes have, in any version that we know.
    """
    stock = sub.stock(vllm)
    if len(stock) < len(sub.bases):
        return  # reported as an import
    owner = stock[0].name
    for name in sorted(overrides):
        file, node = sub.defined[name]
        yield Checked(f"{owner}.{name}", file.at(node), _override_problem(sub, vllm, name))
    for cls in stock:
        for name, definition in cls.own.items():
            first = sub.find(vllm, name)
            if isinstance(definition, Function) and definition.is_abstract and first:
                unmet = first[1] is definition and name not in sub.defined
                why = f"is abstract, and {sub.node.name} does not define it" if unmet else None
                yield Checked(f"{cls.name}.{name}", sub.file.at(sub.node), why)
    for file, node in sub.ours:
        yield from _check_self(sub, vllm, file, node)


def _override_problem(sub: Subclass, vllm: Package, name: str) -> str | None:
    found = sub.find(vllm, name)
    if found is None:
        return f"is gone, but {sub.node.name} overrides it"
    cls, theirs = found
    _, node = sub.defined[name]
    if not isinstance(node, FunctionNode) or not isinstance(theirs, Function):
        return None
    ours = Signature.of(node, theirs.bound)
    why = ours.why_not_in_place_of(theirs.signature)
    return f"of {cls.node.name} may be called in a way that our override {why}" if why else None


def _check_self(
    sub: Subclass, vllm: Package, file: OurModule, node: ast.ClassDef
) -> Iterator[Checked]:
    # What a class only annotates is vLLM's, and named for the type checker; fields are our own.
    annotated = {
        item.target.id: item
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    fields = any(ast.unparse(d).startswith("dataclass") for d in node.decorator_list)
    theirs = {n for n, item in annotated.items() if item.value is None and not fields}
    for name in sorted(theirs):
        yield _checked_member(sub, vllm, file.at(annotated[name]), name, None)
    ours = {*sub.defined, *sub.assigned, *annotated} - theirs
    calls = {id(n.func): n for n in ast.walk(node) if isinstance(n, ast.Call)}
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and (
            ast.unparse(n.value) == "super()" or (_is_self(n.value) and n.attr not in ours)
        ):
            yield _checked_member(sub, vllm, file.at(n), n.attr, calls.get(id(n)))


def _checked_member(
    sub: Subclass, vllm: Package, where: str, name: str, call: ast.Call | None
) -> Checked:
    owner = sub.stock(vllm)[0].name
    found = sub.find(vllm, name)
    problem = None if found else "does not exist"
    if found and call and isinstance(found[1], Function):
        problem = found[1].signature.why_not(Call.of(call))
    return Checked(f"{owner}.{name}", where, problem)


def _is_vllm(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "vllm"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _name_of(found: Module | Class | Value) -> str:
    if isinstance(found, Value):
        return found.kind.name if found.kind else "?"
    return found.name
