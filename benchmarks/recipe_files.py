"""Reads the options that trainers' example scripts set, without running them: hydra overrides in
VeRL's shell scripts, NeMo-RL's YAML with its `defaults`."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Options = dict[str, Any]

_SET = {"DEVICE": "gpu"}
"""Variables that scripts find out by running a command."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=])([^{}]*)|[^{}]*)\}|\$(\w+)")
_TERM = re.compile(r"\$\(\(\s*(\w+)\s*(?:([-+*/])\s*(\w+)\s*)?\)\)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_ASSIGNMENT = re.compile(r"(?:export )?\s*(\w+)=(?!\()(.*)")
_OVERRIDE = re.compile(
    r"""(?:^|[\s"'(])\+{0,2}([a-z_]\w*(?:\.\w+)+)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"'\\)]*)"""
)
_COMMENT = re.compile(
    r"""^((?:[^"'#]|"[^"]*"|'[^']*'|(?<=\S)#)*?)(?:(?<=\s)|^)#.*$""", re.MULTILINE
)
_PATTERN = re.compile(r"\(?([\w*.|\s-]+)\)(?:\s+(.*))?$")


def overrides_of(script: str) -> Options:
    """The hydra overrides of a shell script, nested, as a user with GPUs of NVIDIA's runs it who
    sets no variable. The later of two counts; of `if` and `case` the branch that is taken, where a
    condition that is not understood is false."""
    variables = dict(_SET)
    found: Options = {}
    for statement in _taken(script, variables):
        if assigned := _ASSIGNMENT.match(statement):
            variables[assigned[1]] = _expand(assigned[2], variables)
        for name, text in _OVERRIDE.findall(statement):
            group = found
            *groups, last = name.split(".")
            for each in groups:
                group = group.setdefault(each, {})
            group[last] = _value(_expand(text, variables))
    return found


def config_of(path: Path) -> Options:
    """A NeMo-RL config with its `defaults`, and with plain references to its own values."""
    config = _with_defaults(path)
    return {key: _resolved(value, config, (key,)) for key, value in config.items()}


def at(config: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path; the default where there is none, or null."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return default if config is None else config


def _taken(script: str, variables: Mapping[str, str]) -> Iterator[str]:
    """The statements of a script that are run; their conditions see the variables so far."""
    # Of each `if` or `case` around: whether its branch is run, and whether one was; a case's word.
    around: list[tuple[bool, bool, str | None]] = []
    text = _COMMENT.sub(r"\1", script).replace("\\\n", " ")
    statements = [part.strip() for part in re.split(r"[\n;]", text)]
    while statements:
        statement = statements.pop(0).removeprefix("then ").strip()
        if condition := re.match(r"(if|elif)\s+(.*)", statement):
            done = condition[1] == "elif" and around.pop()[1]
            holds = not done and _holds(condition[2], variables)
            around.append((holds, done or holds, None))
        elif around and (alternative := re.match(r"else\b\s*(.*)", statement)):
            around.append((not around.pop()[1], True, None))
            statements.insert(0, alternative[1])
        elif case := re.match(r"case\s+(.*)\s+in$", statement):
            around.append((False, False, _expand(case[1], variables)))
        elif around and statement in ("fi", "esac"):
            around.pop()
        elif around and around[-1][2] is not None and (pattern := _PATTERN.match(statement)):
            _, done, word = around.pop()
            patterns = {each.strip() for each in pattern[1].split("|")}
            holds = not done and not patterns.isdisjoint({word, "*"})
            around.append((holds, done or holds, word))
            statements.insert(0, pattern[2] or "")
        elif all(run for run, _, _ in around):
            yield statement


def _holds(condition: str, variables: Mapping[str, str]) -> bool:
    """Whether a test of strings holds; False, too, where it is not understood."""
    if len(parts := condition.split("&&")) > 1:
        return all(_holds(part, variables) for part in parts)
    if test := re.fullmatch(r"\s*\[\[?\s+(\S+)\s+(==?|!=)\s+(\S+)\s+\]\]?\s*", condition):
        equal = _expand(test[1], variables) == _expand(test[3], variables)
        return equal == (test[2] != "!=")
    if test := re.fullmatch(r"\s*\[\[?\s+-([nz])\s+(\S+)\s+\]\]?\s*", condition):
        return bool(_expand(test[2], variables)) == (test[1] == "n")
    return False


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """A word with its variables replaced, those that are not set by their defaults or nothing."""

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[4], "") or found[3] or ""

    def number(found: re.Match[str]) -> str:
        left, right = (variables.get(name, name) for name in (found[1], found[3] or "0"))
        known = left.isdigit() and right.isdigit()
        return str(_OPERATORS[found[2] or "+"](int(left), int(right))) if known else ""

    before = None
    while before != text:  # defaults have variables, too
        before, text = text, _TERM.sub(number, _VARIABLE.sub(value, text))
    return re.sub(r"""["']""", "", text).strip()


def _value(text: str) -> Any:
    """A hydra value; what is none stays a text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _with_defaults(path: Path) -> Options:
    config = yaml.safe_load(path.read_text())
    defaults = config.pop("defaults", [])
    merged: Options = {}
    for default in [defaults] if isinstance(defaults, str) else defaults:
        merged = _merge(merged, _with_defaults(path.parent / default))
    return _merge(merged, config)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Options:
    """Two configs; a group with `_override_` takes the place of the one below."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict):
            old = {} if value.get("_override_") else merged.get(key)
            value = _merge(old if isinstance(old, dict) else {}, value)
        merged[key] = value
    return merged


def _resolved(value: Any, config: Options, place: tuple[str, ...]) -> Any:
    """A value with `${a.b}` and `${.c}` replaced."""
    if isinstance(value, dict):
        return {key: _resolved(item, config, (*place, key)) for key, item in value.items()}
    found = re.fullmatch(r"\$\{(\.?)([\w.]+)\}", value) if isinstance(value, str) else None
    if found is None:
        return value
    path = (*(place[:-1] if found[1] else ()), *found[2].split("."))
    return _resolved(at(config, ".".join(path)), config, path)
