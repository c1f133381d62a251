"""The file in which an engine keeps earlier responses for the next one. Pure.

A numpy archive: `keys` uint8 [rows, 16], of the prompts; `sizes` int64 [rows]; `tokens` int32 [sum
of the sizes], row after row, the oldest first.
"""

from __future__ import annotations

import io
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pat_vllm.drafts.corpus import BETWEEN_ROWS, KEY_BYTES, Corpus, Key, Row
from pat_vllm.files.kept import KeptFile
from pat_vllm.files.reading import FileError, name_of, read_bytes

NAME = "responses.npz"
"""The file in `pat.state_dir`."""
_MOST_BYTES = 16 << 30
"""Twice what `draft_history_bytes` allows: a row has a key and a size, too."""
_PATIENCE_SECONDS = 60.0
"""An engine that ends waits this long for what is being written."""


class HistoryFile:
    """Earlier responses in an engine's directory of state, if it has one.

    They are written while the engine goes on: hundreds of megabytes take a second.
    """

    def __init__(self, state_dir: Path | None, vocab_size: int) -> None:
        """Touch nothing yet; the engine's tokens are below `vocab_size`."""
        self._file = KeptFile(state_dir, NAME, "earlier responses")
        self._vocab_size = vocab_size
        self._kept = 0
        self._writer = threading.Thread()

    def load(self, corpus: Corpus) -> int:
        """Add what was kept.

        Returns:
            A number that is another one for other responses; 0: there are none.
        """
        digest = 0
        for key, tokens in self._file.read(read_rows) or ():
            if tokens.max() < self._vocab_size:  # another model's, to the same prompt
                corpus.restore(key, tokens)
                digest = zlib.crc32(tokens.tobytes(), digest)
        self._kept = corpus.num_added
        return digest

    def save(self, corpus: Corpus) -> None:
        """Begin to write the corpus, if it has grown and nothing is being written."""
        if self._file.path is None or corpus.num_added == self._kept or self._writer.is_alive():
            return
        self._kept = corpus.num_added
        rows = corpus.items()
        self._writer = threading.Thread(
            target=lambda: self._file.write(to_bytes(rows)), name="pat-history"
        )
        self._writer.start()

    def close(self, corpus: Corpus) -> None:
        """Write what has not been written; returns when it is there, or after a minute."""
        for _ in range(2):
            if self._writer.ident is not None:
                self._writer.join(_PATIENCE_SECONDS)
            self.save(corpus)


def to_bytes(rows: Sequence[tuple[Key, Row]]) -> bytes:
    """The file's content."""
    content = io.BytesIO()
    np.savez(
        content,
        keys=np.frombuffer(b"".join(key for key, _ in rows), np.uint8).reshape(-1, KEY_BYTES),
        sizes=np.array([len(row.tokens) for _, row in rows], np.int64),
        tokens=np.concatenate([np.empty(0, np.int32), *(row.tokens for _, row in rows)]),
    )
    return content.getvalue()


def read_rows(path: Path) -> list[tuple[Key, np.ndarray]]:
    """Inverse of `to_bytes`: what each prompt is known by, and the tokens of the row.

    Raises:
        FileError: the file cannot be read, is damaged, another user's, or was not written so.
    """
    content = read_bytes(path, "earlier responses", most=_MOST_BYTES, own=True)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:  # checks their CRC
            keys, sizes, tokens = arrays["keys"], arrays["sizes"], arrays["tokens"]
        starts = np.cumsum(sizes) - sizes
        if keys.shape != (len(sizes), KEY_BYTES) or sizes.sum() != len(tokens):
            raise ValueError("its arrays have other shapes")
        if (tokens[starts] != BETWEEN_ROWS).any() or (tokens < BETWEEN_ROWS).any():
            raise ValueError("some tokens are none")
        rows = np.split(tokens, starts[1:]) if len(starts) else []
    except Exception as error:  # damage comes in any form, also as what takes too much memory
        raise FileError(f"{name_of(path)} holds no earlier responses ({error})") from error
    # Copies, or one row that is left would keep all of the file in memory.
    return [(key.tobytes(), row.copy()) for key, row in zip(keys, rows, strict=True)]
