"""Lengths of earlier rollouts, from the files that people have of them. Pure.

Formats are in docs/advise.md. Prompts are told by `prompt_length`, or by `total_length`, the prompt
included. OpenRLHF 0.11.2 writes no file of its rollouts; its `Experience` has lists, one number for
each response of a micro-batch. VeRL's `trainer.rollout_data_dir` has a file `STEP.jsonl` for each
step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pat_vllm.advice.replayed_drafts import Text
from pat_vllm.files.reading import FileError, name_of, parse_json, read_text, shown
from pat_vllm.start.load import learnt_lengths

Tokenize = Callable[[list[str]], list[list[int]]]
"""Token ids of each of some texts."""

LENGTH, TOTAL, PROMPT = "response_length", "total_length", "prompt_length"
TEXT, PROMPT_TEXT = "output", "input"
MOST_TOKENS = 1 << 24
"""Of a prompt or a response."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_GROUPED = re.compile(r"(?<![\d,])[1-9]\d{0,2}(,\d{3})+(?![\d,])")
"""A number with its thousands apart, or numbers."""
_HEADER = re.compile(r'"?(?!(null|none|nan|n/?a|inf|infinity|true|false)\b)[a-z_][^"]*"?', re.I)
"""A word of a line that names columns: neither a number nor what stands where one is missing."""
_AT_LINE = re.compile(r"at line (\d+)")
_MOST_BYTES = 1 << 30
"""Of a file: it may hold the text of a step."""

FORMATS = (
    "a JSON array of lengths, one length per line, or JSON lines with "
    f'"{LENGTH}" (tokens) or "{TEXT}" (text, as in VeRL\'s trainer.rollout_data_dir)'
)


@dataclass(frozen=True)
class EarlierRollouts:
    """Responses of earlier iterations.

    Attributes:
        name: of the file.
        lengths: tokens of each response.
        num_prompt_tokens: of each response's prompt; empty where the file does not tell.
        texts: of each iteration, which is a file, the oldest first; empty where they or their
            prompts are not told.
    """

    name: str
    lengths: tuple[int, ...]
    num_prompt_tokens: tuple[int, ...] = ()
    texts: tuple[tuple[Text, ...], ...] = ()


def read_rollouts(path: Path, tokenize: Tokenize | None = None) -> EarlierRollouts:
    """The responses in a file, or in all `*.jsonl` files of a directory.

    Args:
        tokenize: for files that have text; None: such a file is an error.

    Raises:
        ValueError: it cannot be read, or does not hold lengths; says where, what is there and what
            is expected.
    """
    if not path.is_dir():
        return _read_file(path, tokenize)
    files = sorted(path.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise ValueError(f"directory {name_of(path)} has no *.jsonl file; name a file: {FORMATS}")
    parts = [_read_file(file, tokenize) for file in files]
    has_prompts = all(part.num_prompt_tokens for part in parts)
    return EarlierRollouts(
        path.name,
        tuple(length for part in parts for length in part.lengths),
        tuple(tokens for part in parts for tokens in part.num_prompt_tokens) if has_prompts else (),
        tuple(iteration for part in parts for iteration in part.texts) if has_prompts else (),
    )


def _read_file(path: Path, tokenize: Tokenize | None) -> EarlierRollouts:
    try:
        text = read_text(path, "--lengths", most=_MOST_BYTES)
    except FileError as error:
        raise FileError(f"{error}; expected {FORMATS}") from None
    start = text.lstrip()[:1]
    if not start:
        raise ValueError(f"{name_of(path)} is empty; expected {FORMATS}")
    if start not in "[{":
        try:
            return EarlierRollouts(path.stem, tuple(_lengths_in(text)))
        except ValueError as error:
            raise ValueError(f"{name_of(path)}: {error}; expected {FORMATS}") from None
    try:
        whole = parse_json(text)
    except ValueError as error:
        return _of_records(path, _json_lines(path, text, str(error)), tokenize)
    if isinstance(whole, dict) and "lengths" in whole:
        names = (("lengths", LENGTH), ("num_prompt_tokens", PROMPT))
        whole = {record: whole[name] for name, record in names if name in whole}
    if isinstance(whole, dict) and {"digest", "history"} <= whole.keys():
        if not (lengths := learnt_lengths(path)):
            raise ValueError(
                f"{name_of(path)} was kept by an engine that has learnt from no response; run one "
                "first. Requests with ignore_eos do not count: their lengths are prescribed"
            )
        return EarlierRollouts(path.stem, lengths)
    if not isinstance(whole, list):
        return _of_records(path, [("line 1", whole)], tokenize)
    if not whole:
        raise ValueError(f"{name_of(path)} is an empty array; expected {FORMATS}")
    return _of_records(path, [(f"entry {i}", value) for i, value in enumerate(whole, 1)], tokenize)


def _json_lines(path: Path, text: str, why: str) -> list[tuple[str, Any]]:
    """(where it is, value) of each line.

    Args:
        why: the whole is no JSON.
    """
    records: list[tuple[str, Any]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append((f"line {number}", parse_json(line)))
        except ValueError as error:
            said = str(error)
            if not records and (at := _AT_LINE.search(why)):  # of one value over several lines
                number, said = min(int(at[1]), len(lines)), why
            raise ValueError(
                f"{name_of(path)}, line {number} is no JSON ({said}): "
                f"{shown(lines[number - 1].strip())}; expected {FORMATS}"
            ) from None
    return records


def _of_records(
    path: Path, records: Sequence[tuple[str, Any]], tokenize: Tokenize | None
) -> EarlierRollouts:
    first = next((record for _, record in records if isinstance(record, dict)), {})
    if LENGTH not in first and first:
        return _of_texts(path, records, tokenize)
    lengths: list[int] = []
    prompts: list[int] = []
    for where, record in records:
        at = f"{name_of(path)}, {where}"
        if not isinstance(record, dict) and not first:
            lengths += _whole_numbers(at, "a length", record)
            continue
        if not isinstance(record, dict) or LENGTH not in record:
            raise ValueError(f'{at}: it must have "{LENGTH}" as other lines, got {_given(record)}')
        of_record = _whole_numbers(at, LENGTH, record[LENGTH])
        lengths += of_record
        if PROMPT in record:
            prompts += _whole_numbers(at, PROMPT, record[PROMPT])
        elif TOTAL in record:
            totals = _whole_numbers(at, TOTAL, record[TOTAL])
            of_prompts = [total - length for total, length in zip(totals, of_record, strict=False)]
            if len(totals) != len(of_record) or min(of_prompts, default=1) < 1:
                raise ValueError(
                    f"{at}: {TOTAL} must exceed {LENGTH} by the prompt, got {shown(totals)}"
                )
            prompts += of_prompts
    has_prompts = len(prompts) == len(lengths)
    return EarlierRollouts(path.stem, tuple(lengths), tuple(prompts) if has_prompts else ())


def _of_texts(
    path: Path, records: Sequence[tuple[str, Any]], tokenize: Tokenize | None
) -> EarlierRollouts:
    texts: list[str] = []
    prompts: list[str] = []
    for where, record in records:
        at = f"{name_of(path)}, {where}"
        if not isinstance(record, dict) or TEXT not in record:
            raise ValueError(f"{at} has {_given(record)}; expected {FORMATS}")
        if not isinstance(text := record[TEXT], str):
            raise ValueError(
                f'{at}: "{TEXT}" must be text, got {_given(text)}; leave out responses that were '
                "aborted"
            )
        texts.append(text)
        if isinstance(prompt := record.get(PROMPT_TEXT), str) and prompt:
            prompts.append(prompt)
    if tokenize is None:
        raise ValueError(
            f'{name_of(path)} holds text ("{TEXT}"), not lengths; name the checkpoint that made it '
            "with --model DIRECTORY, whose tokenizer.json counts its tokens"
        )
    # A response without text had an end-of-sequence token at least.
    responses = [np.array(ids, np.int32) for ids in tokenize(texts)]
    lengths = tuple(max(1, len(response)) for response in responses)
    if len(prompts) < len(texts):
        return EarlierRollouts(path.stem, lengths)
    asked = [np.array(ids, np.int32) for ids in tokenize(prompts)]
    return EarlierRollouts(
        path.stem,
        lengths,
        tuple(max(1, len(ids)) for ids in asked),
        texts=(tuple(map(Text, asked, responses)),),
    )


def _given(value: Any) -> str:
    """What is there, for messages: as JSON has it, of an object its fields."""
    if isinstance(value, dict):
        return ", ".join(map(shown, [*value][:12])) or "{}"
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def _whole_numbers(at: str, name: str, value: Any) -> list[int]:
    """A number, or a list of them."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    numbers = []
    for place, number in enumerate(values, 1):
        if type(number) not in (int, float) or not 1 <= number <= MOST_TOKENS or number % 1:
            of_list = f" ({place} of {len(value)})" if isinstance(value, list) else ""
            raise ValueError(
                f"{at}: {name} must be a whole number of tokens, at least 1 and at most "
                f"{MOST_TOKENS:,}, got {_given(number)}{of_list}; leave out responses that were "
                "aborted"
            )
        numbers.append(int(number))
    return numbers


def _lengths_in(text: str) -> list[int]:
    """Lengths in a text that is no JSON: a number a line, after an optional line of words, with `#`
    comments; or all of them on one line.

    Raises:
        ValueError: says which line is something else, and what is there.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    filled = [(number, line) for number, line in enumerate(lines, 1) if line]
    words = [(number, re.findall(r"[^\s,;]+", line)) for number, line in filled]
    if words and all(_HEADER.fullmatch(word) for word in words[0][1]):
        number, header = words.pop(0)
        if len(header) > 1 and re.search("[,;\t]", lines[number - 1]):
            raise ValueError(
                f"line {number} has columns, {shown(lines[number - 1])}; keep that of lengths alone"
            )
    if not words:
        raise ValueError("it has no lengths")
    lengths: list[int] = []
    for number, of_line in words:
        if _GROUPED.search(lines[number - 1]):
            raise ValueError(
                f"line {number} has a comma within a number or between two, "
                f"{shown(lines[number - 1])}: write 1024 for 1,024, and a space behind other commas"
            )
        if len(of_line) != 1 and len(words) > 1:
            raise ValueError(
                f"line {number} must be one length in tokens, got {shown(lines[number - 1])}; only "
                "a line that has all of them may have several"
            )
        for word in of_line:
            value = float(word) if _NUMBER.fullmatch(word := word.strip('"')) else math.nan
            if not 1 <= value <= MOST_TOKENS or value % 1:
                raise ValueError(
                    f"line {number} must be one length in tokens, got {shown(word)}; allowed are "
                    f"whole numbers from 1 to {MOST_TOKENS:,}"
                )
            lengths.append(int(value))
    return lengths
