"""Files of earlier rollouts, as people and trainers have them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from pat_vllm.advice.batches import sampled_batches
from pat_vllm.advice.lengths import read_rollouts
from pat_vllm.cli.advise import AdviseOptions
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.length_model import LengthModel


def words(texts: list[str]) -> list[list[int]]:
    return [[zlib.crc32(word.encode()) >> 1 for word in text.split()] for text in texts]


VERL = (
    '{"input": "what is it", "output": "a b c", "gts": "c", "score": 1, "step": 7, "uid": "0_0"}\n'
    '{"input": "what is it", "output": "", "gts": "c", "score": 0, "step": 7, "uid": "0_1"}\n'
)
"""As `trainer.rollout_data_dir` has it."""


@pytest.mark.parametrize(
    ("name", "text", "lengths", "prompts"),
    [
        ("array.json", "[120, 4000.0, 7]", (120, 4000, 7), ()),
        ("lines.txt", "length\n120\n# old\n4000\n", (120, 4000), ()),
        ("floats.txt", "812.0\n8e2\n\n.3e1 # short\n", (812, 800, 3), ()),
        ("header.csv", '\ufeff"response length"\r\n"812.0",\r\n400;\r\n', (812, 400), ()),
        ("one.txt", "120, 4000,7\n", (120, 4000, 7), ()),
        ("one.json", "lengths\n120 4000.0 7", (120, 4000, 7), ()),
        ("lines.jsonl", "\n120\n8e2\n", (120, 800), ()),
        ("lists.jsonl", "[120, 4000.0]\n7\n", (120, 4000, 7), ()),
        ("trace.json", '{"lengths": [3, 9.0], "num_prompt_tokens": [5.0, 6]}', (3, 9), (5, 6)),
        ("records.jsonl", '{"response_length": 12}\n\n{"response_length": 9}\n', (12, 9), ()),
        (
            "openrlhf.jsonl",
            '{"response_length": [12, 9], "total_length": [20, 17], "reward": [0, 1]}\n'
            '{"response_length": [3.0], "total_length": [11.0], "reward": [0]}\n',
            (12, 9, 3),
            (8, 8, 8),
        ),
        ("7.jsonl", VERL, (3, 1), (3, 3)),
        ("records.json", '[{"output": "a b"}]', (2,), ()),
    ],
)
def test_every_format_is_read(
    tmp_path: Path, name: str, text: str, lengths: tuple[int, ...], prompts: tuple[int, ...]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    rollouts = read_rollouts(file, words)
    assert (rollouts.lengths, rollouts.num_prompt_tokens) == (lengths, prompts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", "empty array"),
        ("a.json", "[3, 0]", "entry 2: a length must be a whole number .* got 0; leave out"),
        ("a.json", "[3, 2.5]", "got 2.5"),
        ("a.json", "[3, NaN]", "entry 2: .* got nan"),
        ("a.json", "[3, null]", "entry 2: .* got null"),
        ("a.json", "[3,\n 4,\n x]", "line 3 is no JSON .*'x.'; expected"),
        ("a.json", '{"lengths": [3, 4.5]}', r"whole number of tokens, .* got 4.5 \(2 of 2\)"),
        ("a.json", "[3, 4", "line 1 is no JSON .* expected a JSON array"),
        ("a.txt", "12\ntwelve\n", "line 2 must be one length in tokens, got 'twelve'"),
        (
            "a.txt",
            "12\n-3\n",
            "line 2 must be one length in tokens, got '-3'; allowed are whole numbers from 1 to 16",
        ),
        ("a.txt", "12\n\n8.5\n", "line 3 must be one length in tokens, got '8.5'"),
        ("a.txt", "nan\n12\n", "line 1 must be one length in tokens, got 'nan'"),
        ("a.txt", "length\nnull\n", "line 2 must be one length in tokens, got 'null'"),
        ("a.txt", "True\n12\n", "line 1 must be one length in tokens, got 'True'"),
        ("a.txt", "1e400\n", "line 1 must be one length in tokens, got '1e400'"),
        ("a.txt", "1_000\n", "line 1 must be one length in tokens, got '1_000'"),
        ("a.txt", "12, x, 9\n", "line 1 must be one length in tokens, got 'x'"),
        ("a.txt", "length\n# none\n", "it has no lengths; expected"),
        ("a.csv", "id,length\n0,812\n", "line 1 has columns, 'id,length'; keep that of lengths"),
        ("a.csv", "0,812\n1,400\n", "line 1 must be one length in tokens, got '0,812'; only"),
        ("a.jsonl", '{"output": "a"}\n{"output": null}', 'line 2: "output" must be text, got null'),
        ("a.jsonl", '{"output": "a"}\nnull', "line 2 has null; expected"),
        ("a.jsonl", '{"output": {"text": "a"}}', "line 1: \"output\" must be text, got 'text'"),
        (
            "a.jsonl",
            '{"response_length": 3}\n{"output": "a"}',
            "line 2: it must have .* got 'output'",
        ),
        ("a.jsonl", '{"response_length": 3}\n4', 'line 2: it must have "response_length" as'),
        ("a.jsonl", '{"response_length": true}', "line 1: response_length .* got true; leave out"),
        ("a.jsonl", '{"response_length": [3, null, 4]}', r"got null \(2 of 3\)"),
        ("a.jsonl", '{"response_length": 3}\n{"response', "line 2 is no JSON"),
        ("a.jsonl", '{"tokens": 3, "id": 1}\n', "line 1 has 'tokens', 'id'; expected"),
        ("a.jsonl", '{"response_length": [3], "total_length": [3]}', "must exceed response_length"),
        ("a.jsonl", '{"output": "a"}\n', "holds text .* --model DIRECTORY"),
        ("a.json", '{"digest": 1, "history": "x"}', "its digest does not match"),
        ("a.jsonl", '{"turns": []}\n', "line 1 has 'turns'; expected"),
        ("a.parquet", b"PAR1\xff\xfe\x00", "is no text file: .* expected a JSON array"),
    ],
)
def test_other_files_are_errors(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    count = None if "--model" in message else words
    with pytest.raises(ValueError, match=message) as error:
        read_rollouts(file, count)
    assert str(file) in str(error.value)


def test_directory_of_verl_is_read_by_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \*\.jsonl file"):
        read_rollouts(tmp_path)
    for step in (10, 2):
        text = json.dumps({"input": "x", "output": " ".join("w" * step), "step": step})
        (tmp_path / f"{step}.jsonl").write_text(text)
    assert read_rollouts(tmp_path, words).lengths == (2, 10)


def test_history_of_an_engine_is_read(tmp_path: Path) -> None:
    model = LengthModel(4096)
    file = tmp_path / "lengths.json"
    file.write_text(learned_state.to_json(model))
    with pytest.raises(ValueError, match="has learnt from no response; run one first"):
        read_rollouts(file)
    seen = np.exp(np.random.default_rng(0).normal(6, 0.7, 3000)).clip(1, 4000).astype(int)
    for length in seen.tolist():
        model.finished(length, complete=True)
    model.end_of_batch()
    file.write_text(learned_state.to_json(model))
    expected = read_rollouts(file).lengths
    quantiles = [0.1, 0.5, 0.9, 0.99]
    assert np.quantile(expected, quantiles) == pytest.approx(np.quantile(seen, quantiles), rel=0.1)


def test_batches_are_drawn_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    prompts = {10: 3, 500: 4, 9000: 5}
    file.write_text(
        "".join(f'{{"response_length": {a}, "prompt_length": {b}}}\n' for a, b in prompts.items())
    )
    options = AdviseOptions(responses=200, max_tokens=1000, seed=1, lengths=file)
    batches, longest = sampled_batches(options, read_rollouts(file), 0.5)
    assert longest == 1005 and len(batches) > 2
    for batch in batches:
        assert {*batch.lengths.tolist()} == {10, 500, 1000}, "long ones are cut short"
        expected = {min(length, 1000): tokens for length, tokens in prompts.items()}
        assert batch.num_prompt_tokens.tolist() == [expected[n] for n in batch.lengths.tolist()]
        assert batch.acceptance is not None and batch.acceptance.mean() == pytest.approx(0.5, 0.1)
    assert batches[0].lengths.tolist() != batches[1].lengths.tolist()
