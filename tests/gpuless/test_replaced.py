"""What imitations of GPUs replace of vLLM is listed in one place, and nothing else is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.gpuless.replaced import REASONS

FILES = [
    path
    for path in sorted((Path(__file__).parents[1] / "gpuless").glob("*.py"))
    if path.name != "replaced.py"
]


def test_what_is_listed_is_replaced() -> None:
    """Some file names the attribute and what has it."""
    words = [set(re.findall(r"\w+", path.read_text())) for path in FILES]
    unused = [key for key in REASONS if not any(set(parts(key)) <= of_file for of_file in words)]
    assert not unused


def parts(key: str) -> list[str]:
    """The last two parts of where an attribute is."""
    return re.split("[.:]", key)[-2:]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_replaced_is_listed(path: Path) -> None:
    assert not replaced_elsewhere(path.read_text())


def replaced_elsewhere(source: str) -> list[str]:
    """Lines on which something of vLLM is replaced, but not by `replace`."""
    nodes = sorted(ast.walk(ast.parse(source)), key=lambda node: getattr(node, "lineno", 0))
    of_vllm: set[str] = set()

    def is_vllm(node: ast.AST) -> bool:
        """A name from vLLM, an attribute of one, its type, or a string that says so."""
        match node:
            case ast.Name(id=name):
                return name in of_vllm
            case ast.Attribute(value=owner) | ast.Call(func=ast.Name("type"), args=[owner]):
                return is_vllm(owner)
            case ast.JoinedStr(values=[first, *_]):
                return is_vllm(first)
            case ast.Constant(value=str(text)):
                return text.startswith("vllm.")
        return False

    lines = []
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "vllm":
                of_vllm |= {each.asname or each.name for each in node.names}
            case ast.Import():
                names = [(each.asname or "vllm", each.name) for each in node.names]
                of_vllm |= {name for name, module in names if module.split(".")[0] == "vllm"}
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                inside = [each for target in targets for each in ast.walk(target)]
                if any(isinstance(each, ast.Attribute) and is_vllm(each) for each in inside):
                    lines.append(f"line {node.lineno}")
                elif isinstance(node.value, ast.AST) and is_vllm(node.value):
                    of_vllm |= {each.id for each in targets if isinstance(each, ast.Name)}
            case ast.Call(func=ast.Attribute(ast.Call(ast.Name("vars"), [owner]), "update")):
                lines += [f"line {node.lineno}"] * is_vllm(owner)
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name), args=[owner, *_]):
                puts = name in ("setattr", "object", "patch", "delattr")
                lines += [f"line {node.lineno}"] * (puts and is_vllm(owner))
    return lines
