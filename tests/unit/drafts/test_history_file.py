"""The file of earlier responses is whole, and written beside the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pat_vllm.drafts import history_file
from pat_vllm.drafts.corpus import Corpus, key_of
from pat_vllm.drafts.history_file import NAME, HistoryFile, read_rows, to_bytes
from pat_vllm.files.reading import FileError

VOCAB = 1 << 31
KEYS = [key_of([1]), key_of([2]), key_of([1], "salt")]


def corpus_of(*responses: tuple[int, list[int]]) -> Corpus:
    """A corpus with these responses to the prompts 0 to 2."""
    corpus = Corpus(1 << 20)
    for prompt, tokens in responses:
        corpus.add(KEYS[prompt], [7, 8], tokens)
    return corpus


def content(corpus: Corpus) -> list[tuple[bytes, list[int]]]:
    return [(key, row.tokens.tolist()) for key, row in corpus.items()]


def loaded(state_dir: Path, max_bytes: int = 1 << 20) -> Corpus:
    corpus = Corpus(max_bytes)
    HistoryFile(state_dir, VOCAB).load(corpus)
    return corpus


def test_all_rows_come_back_in_their_order(tmp_path: Path) -> None:
    before = corpus_of((1, [3]), (0, [4, 5]), (1, [2**31 - 1]), (2, [6] * 1000))
    HistoryFile(tmp_path, VOCAB).close(before)
    after = loaded(tmp_path)
    assert content(after) == content(before)
    assert after.num_bytes == before.num_bytes
    # An engine that keeps less takes the latest.
    assert content(loaded(tmp_path, 4020)) == content(before)[-1:]


def test_an_empty_corpus_and_no_directory(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path, VOCAB)
    file.close(Corpus(1 << 20))
    assert not list(tmp_path.iterdir())
    assert content(loaded(tmp_path)) == []
    (tmp_path / NAME).write_bytes(to_bytes([]))
    assert content(loaded(tmp_path)) == []
    nothing = HistoryFile(None, VOCAB)
    nothing.load(Corpus(0))
    nothing.close(corpus_of((0, [1])))


def test_it_is_written_beside_the_engine_and_what_came_meanwhile_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, written = threading.Event(), []

    def wait(rows: list[Any]) -> bytes:
        assert goes_on.wait(60)
        written.append(len(rows))
        return to_bytes(rows)

    monkeypatch.setattr(history_file, "to_bytes", wait)
    file, corpus = HistoryFile(tmp_path, VOCAB), corpus_of((0, [1]))
    file.save(corpus)
    corpus.add(KEYS[1], [7, 8], [2])
    file.save(corpus)  # while the first is written
    goes_on.set()
    file.close(corpus)
    file.save(corpus)  # nothing is new
    file.close(corpus)
    assert written == [1, 2]
    assert content(loaded(tmp_path)) == content(corpus)


def test_tokens_that_the_model_does_not_have_are_no_drafts(tmp_path: Path) -> None:
    HistoryFile(tmp_path, VOCAB).close(corpus_of((0, [511]), (0, [512]), (1, [3])))
    corpus = Corpus(1 << 20)
    salt = HistoryFile(tmp_path, 512).load(corpus)
    assert content(corpus) == content(corpus_of((0, [511]), (1, [3])))
    # Other contents, another number: it seeds what the next engine samples.
    assert salt and salt != HistoryFile(tmp_path, 513).load(Corpus(1 << 20))


def flip(path: Path, where: Callable[[bytearray], int]) -> None:
    whole = bytearray(path.read_bytes())
    whole[where(whole)] ^= 1
    path.write_bytes(whole)


def rewrite(path: Path, **changed: Callable[..., Any]) -> None:
    with np.load(path) as had:
        np.savez(path, **{**had, **{name: change(had[name]) for name, change in changed.items()}})


HARM: dict[str, Callable[[Path], Any]] = {
    "damaged": lambda path: flip(path, lambda whole: len(whole) // 2),
    "encrypted": lambda path: flip(path, lambda whole: whole.index(b"PK\x01\x02") + 8),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "other arrays": lambda path: np.savez(path, tokens=np.zeros(3)),
    "other sizes": lambda path: rewrite(path, sizes=lambda had: had + 1),
    "more tokens": lambda path: rewrite(path, tokens=lambda had: np.append(had, np.int32(5))),
    "no tokens": lambda path: rewrite(path, tokens=lambda had: had - 5),
    "pickled": lambda path: rewrite(path, keys=lambda had: np.array([{}], object)),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_damage_is_seen(harm: Callable[[Path], Any], tmp_path: Path) -> None:
    HistoryFile(tmp_path, VOCAB).close(corpus_of((0, list(range(100))), (1, [2])))
    path = tmp_path / NAME
    assert len(read_rows(path)) == 2
    harm(path)
    with pytest.raises(FileError, match=NAME):
        read_rows(path)
