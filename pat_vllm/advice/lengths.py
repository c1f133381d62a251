"""Lengths of earlier rollouts, from the files that people have of them. Pure.

Formats are in docs/advise.md. Prompts are told by `prompt_length`, beside `turns` that of the first
one, or by `total_length`, the prompt included. OpenRLHF 0.11.2 writes no file of its rollouts; its
`Experience` has lists, one number for each response of a micro-batch. VeRL's
`trainer.rollout_data_dir` has a file `STEP.jsonl` for each step.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pat_vllm.advice.replayed_drafts import Text
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import FileError, name_of, parse_json, read_text, shown
from pat_vllm.modelled.batch_time import Load
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.state import LiveRequests
from pat_vllm.simulator.traces import (
    MOST_SECONDS,
    MOST_TOKENS,
    LengthTrace,
    TurnLengths,
    lengths_in,
    load_trace,
)
from pat_vllm.start.buffers import EngineShape

Tokenize = Callable[[list[str]], list[list[int]]]
"""Token ids of each of some texts."""

LENGTH, TOTAL, PROMPT = "response_length", "total_length", "prompt_length"
TEXT, PROMPT_TEXT = "output", "input"
TURNS, APPENDED, TOOL = "turns", "appended_length", "tool_seconds"

_EXPECTED = 4096
"""Responses that stand for what an engine has learnt."""

_AT_LINE = re.compile(r"at line (\d+)")
_MOST_BYTES = 1 << 30
"""Of a file: it may hold the text of a step."""

FORMATS = (
    "a JSON array of lengths, one length per line, or JSON lines with "
    f'"{LENGTH}" (tokens), "{TEXT}" (text, as in VeRL\'s trainer.rollout_data_dir) or "{TURNS}" (a '
    f'list with "{LENGTH}", "{APPENDED}", "{TOOL}" of each)'
)


@dataclass(frozen=True)
class EarlierRollouts:
    """Responses of earlier iterations.

    Attributes:
        name: of the file.
        lengths: tokens of each response; of a trajectory all that follows its first prompt.
        num_prompt_tokens: of each response's prompt, or each trajectory's first one; empty where
            the file does not tell.
        trajectories: the turns of each; empty where the file has none.
        texts: of each iteration, which is a file, the oldest first; empty where they or their
            prompts are not told.
    """

    name: str
    lengths: tuple[int, ...]
    num_prompt_tokens: tuple[int, ...] = ()
    trajectories: tuple[tuple[TurnLengths, ...], ...] = ()
    texts: tuple[tuple[Text, ...], ...] = ()

    def draw(self, requests: int, max_tokens: int, seed: int) -> LengthTrace:
        """A batch of responses, or trajectories, drawn from these, with replacement; longer ones
        are cut short."""
        random = np.random.default_rng(seed)
        picks = random.integers(len(self.lengths), size=requests).tolist()
        prompts = tuple(self.num_prompt_tokens[i] for i in picks) if self.num_prompt_tokens else ()
        trajectories = self.trajectories or [(TurnLengths(length),) for length in self.lengths]
        turns = [trajectories[i] for i in picks]
        return LengthTrace.of_trajectories(self.name, turns, max_tokens, seed, prompts)


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
    with_turns = [file for file, part in zip(files, parts, strict=True) if part.trajectories]
    if len(with_turns) not in (0, len(files)):
        raise ValueError(
            f'directory {name_of(path)} has "{TURNS}" in {len(with_turns)} of {len(files)} files, '
            f"first in {name_of(with_turns[0])}; keep those with and without in directories of "
            "their own"
        )
    return EarlierRollouts(
        path.name,
        tuple(length for part in parts for length in part.lengths),
        tuple(tokens for part in parts for tokens in part.num_prompt_tokens) if has_prompts else (),
        tuple(trajectory for part in parts for trajectory in part.trajectories),
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
            return EarlierRollouts(path.stem, tuple(lengths_in(text)))
        except ValueError as error:
            raise ValueError(f"{name_of(path)}: {error}; expected {FORMATS}") from None
    try:
        whole = parse_json(text)
    except ValueError as error:
        return _of_records(path, _json_lines(path, text, str(error)), tokenize)
    if isinstance(whole, dict) and "lengths" in whole:
        trace = load_trace(path)
        if trace.has_turns:
            raise ValueError(
                f"{name_of(path)} is a trace with turns; replay it as it is (--trace), or give its "
                f'trajectories, a line each: {{"{TURNS}": [...]}}'
            )
        has_prompts = "num_prompt_tokens" in whole
        return EarlierRollouts(
            path.stem, trace.lengths, trace.num_prompt_tokens if has_prompts else ()
        )
    if isinstance(whole, dict) and {"digest", "history"} <= whole.keys():
        if not (lengths := learnt(path)):
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


def learnt(path: Path) -> tuple[int, ...]:
    """Tokens of some responses, as an engine would expect them by what it has kept; none if it has
    seen none.

    Raises:
        ValueError: the file cannot be read.
    """
    model, _ = learned_state.load(path)
    if not model.responses:
        return ()
    fresh = LiveRequests.fresh(np.ones(1, np.int64), model.bound)
    return tuple(model.sample(fresh, _EXPECTED)[0].tolist())


def expected_load(pat: PATConfig, engine: EngineShape, ranks: int) -> Load:
    """As many requests as an engine's limits let one expect, as long as what it has kept says, if
    that can be read. The engine core sets aside what cannot."""
    load = Load.usual(engine.max_num_seqs, ranks, engine.max_model_len)
    if pat.state_dir is not None and (kept := Path(pat.state_dir) / learned_state.NAME).exists():
        with contextlib.suppress(FileError):
            if lengths := learnt(kept):
                return replace(load, lengths=lengths)
    return load


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
    if any(isinstance(record, dict) and TURNS in record for _, record in records):
        return _of_trajectories(path, records)
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


def _of_trajectories(path: Path, records: Sequence[tuple[str, Any]]) -> EarlierRollouts:
    trajectories: list[tuple[TurnLengths, ...]] = []
    prompts: list[int] = []
    for where, record in records:
        at = f"{name_of(path)}, {where}"
        turns = record.get(TURNS) if isinstance(record, dict) else None
        if not isinstance(turns, list) or not turns:
            raise ValueError(
                f'{at}: "{TURNS}" must be a list of turns, as other lines have, got '
                f"{shown(record if turns is None else turns)}"
            )
        numbered = [(f"{at}, turn {number}", turn) for number, turn in enumerate(turns, 1)]
        *earlier, last = numbered
        trajectories.append((*(_turn(*entry) for entry in earlier), _turn(*last, last=True)))
        if PROMPT in record:
            prompts += _whole_numbers(at, PROMPT, [record[PROMPT]])
    has_prompts = len(prompts) == len(trajectories)
    lengths = tuple(
        int(sum(turn.response + turn.appended for turn in turns)) for turns in trajectories
    )
    return EarlierRollouts(
        path.stem, lengths, tuple(prompts) if has_prompts else (), tuple(trajectories)
    )


def _turn(at: str, turn: Any, last: bool = False) -> TurnLengths:
    """A turn of a record. What follows the last one's response does not matter."""
    wanted = (LENGTH,) if last else (LENGTH, APPENDED, TOOL)
    if not isinstance(turn, dict) or any(name not in turn for name in wanted):
        names = ", ".join(map(repr, wanted))
        raise ValueError(f"{at} must be an object with {names}, got {shown(turn)}")
    (response,) = _whole_numbers(at, LENGTH, [turn[LENGTH]])
    if last:
        return TurnLengths(response)
    appended = 0 if turn[APPENDED] == 0 else _whole_numbers(at, APPENDED, [turn[APPENDED]])[0]
    seconds = turn[TOOL]
    if type(seconds) not in (int, float) or not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{at}: {TOOL} must be seconds, at least 0, got {shown(seconds)}")
    return TurnLengths(response, appended, float(seconds))


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
