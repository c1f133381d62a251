"""The file of earlier responses: whole, private, and no reason for an engine not to start."""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pat_vllm.drafts import history_file
from pat_vllm.drafts.corpus import Corpus, key_of
from pat_vllm.drafts.history_file import HistoryFile
from pat_vllm.files.reading import SET_ASIDE, FileError

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


def loaded(path: Path, max_bytes: int = 1 << 20) -> Corpus:
    corpus = Corpus(max_bytes)
    HistoryFile(path, VOCAB).load(corpus)
    return corpus


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.npz"


def test_all_rows_come_back_in_their_order(path: Path) -> None:
    before = corpus_of((1, [3]), (0, [4, 5]), (1, [2**31 - 1]), (2, [6] * 1000))
    HistoryFile(path, VOCAB).close(before)
    after = loaded(path)
    assert content(after) == content(before)
    assert after.num_bytes == before.num_bytes
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # An engine that keeps less takes the latest.
    assert content(loaded(path, 4020)) == content(before)[-1:]


def test_an_empty_corpus_and_no_file(path: Path) -> None:
    file = HistoryFile(path, VOCAB)
    file.close(Corpus(1 << 20))
    assert not path.exists()
    assert content(loaded(path)) == []
    history_file.write_rows(path, [])
    assert content(loaded(path)) == []
    nothing = HistoryFile(None, VOCAB)
    nothing.load(Corpus(0))
    nothing.close(corpus_of((0, [1])))


def test_it_is_written_beside_the_engine_and_what_came_meanwhile_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, write, written = threading.Event(), history_file.write_rows, []

    def wait(path: Path, rows: list[object]) -> None:
        assert goes_on.wait(60)
        written.append(len(rows))
        write(path, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(history_file, "write_rows", wait)
    file, corpus = HistoryFile(path, VOCAB), corpus_of((0, [1]))
    file.save(corpus)
    corpus.add(KEYS[1], [7, 8], [2])
    file.save(corpus)  # while the first is written
    goes_on.set()
    file.close(corpus)
    file.save(corpus)  # nothing is new
    file.close(corpus)
    assert written == [1, 2]
    assert content(loaded(path)) == content(corpus)


def test_tokens_that_the_model_does_not_have_are_no_drafts(path: Path) -> None:
    HistoryFile(path, VOCAB).close(corpus_of((0, [511]), (0, [512]), (1, [3])))
    corpus = Corpus(1 << 20)
    salt = HistoryFile(path, 512).load(corpus)
    assert content(corpus) == content(corpus_of((0, [511]), (1, [3])))
    # Other contents, another number: it seeds what the next engine samples.
    assert salt and salt != HistoryFile(path, 513).load(Corpus(1 << 20))


def flip(path: Path, where: Callable[[bytearray], int]) -> None:
    whole = bytearray(path.read_bytes())
    whole[where(whole)] ^= 1
    path.write_bytes(whole)


def rewrite(
    path: Path, save: Callable[..., None] = np.savez, **changed: Callable[..., Any]
) -> None:
    with np.load(path) as had:
        save(path, **{**had, **{name: change(had[name]) for name, change in changed.items()}})


HARM: dict[str, Callable[[Path], Any]] = {
    "damaged": lambda path: flip(path, lambda whole: len(whole) // 2),
    "encrypted": lambda path: flip(path, lambda whole: whole.index(b"PK\x01\x02") + 8),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "compressed": lambda path: rewrite(path, np.savez_compressed),
    "other arrays": lambda path: np.savez(path, tokens=np.zeros(3)),
    "other sizes": lambda path: rewrite(path, sizes=lambda had: had + 1),
    "more tokens": lambda path: rewrite(path, tokens=lambda had: np.append(had, np.int32(5))),
    "no tokens": lambda path: rewrite(path, tokens=lambda had: had - 5),
    "pickled": lambda path: rewrite(path, keys=lambda had: np.array([{}], object)),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_what_cannot_be_read_is_set_aside(
    harm: Callable[[Path], Any], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    HistoryFile(path, VOCAB).close(corpus_of((0, list(range(100))), (1, [2])))
    harm(path)
    with pytest.raises(FileError, match=path.name):
        history_file.read_rows(path)
    with caplog.at_level(logging.WARNING):
        assert content(loaded(path)) == []
    assert SET_ASIDE in caplog.text and "draft_history_file" in caplog.text
    assert not path.exists() and path.with_name(path.name + SET_ASIDE).exists()


def test_a_file_that_cannot_be_written_is_said_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir()
    file, corpus = HistoryFile(path, VOCAB), corpus_of((0, [1]))
    with caplog.at_level(logging.WARNING):
        for token in (2, 3):
            corpus.add(KEYS[0], [7, 8], [token])
            file.close(corpus)
    assert caplog.text.count("cannot be written") == 1
