"""The file in which an engine keeps earlier responses for the next one. Pure.

A numpy archive: `keys` uint8 [rows, 16], of the prompts; `sizes` int64 [rows]; `tokens` int32 [sum
of the sizes], row after row, the oldest first.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pat_vllm.drafts.corpus import BETWEEN_ROWS, KEY_BYTES, Corpus, Key, Row
from pat_vllm.files.reading import FileError, name_of, read_bytes, set_aside
from pat_vllm.files.writing import write_whole

logger = logging.getLogger(__name__)

_OPTION = "pat.draft_history_file"
_MOST_BYTES = 16 << 30
"""Twice what `draft_history_bytes` allows: a row has a key and a size, too."""
_PATIENCE = 60.0
"""Seconds to wait for what is being written when the engine ends."""


class HistoryFile:
    """The file of an engine, if it has one.

    It is written while the engine goes on: hundreds of megabytes take a second.
    """

    def __init__(self, path: Path | None, vocab_size: int) -> None:
        """Of an engine whose tokens are below `vocab_size`."""
        self._path = path
        self._vocab_size = vocab_size
        self._kept = 0
        self._writer = threading.Thread()
        self._failed: str | None = None

    def load(self, corpus: Corpus) -> int:
        """Add what the file holds; what cannot be read is set aside, and the log says so.

        Returns:
            A number that is another one for other contents; 0: the file holds nothing.
        """
        if self._path is None or not os.path.exists(self._path):
            return 0
        try:
            rows = read_rows(self._path)
        except FileError as error:
            set_aside(self._path, _OPTION, error)
            return 0
        digest = 0
        for key, tokens in rows:
            if tokens.max() < self._vocab_size:  # another model's, to the same prompt
                corpus.restore(key, tokens)
                digest = zlib.crc32(tokens.tobytes(), digest)
        self._kept = corpus.num_added
        return digest

    def save(self, corpus: Corpus) -> None:
        """Begin to write the corpus, if it has grown and nothing is being written."""
        if self._path is None or corpus.num_added == self._kept or self._writer.is_alive():
            return
        self._kept = corpus.num_added
        arguments = self._path, corpus.items()
        self._writer = threading.Thread(target=self._write, args=arguments, name="pat-history")
        self._writer.start()

    def close(self, corpus: Corpus) -> None:
        """Write what has not been written; returns when it is there, or after a minute."""
        for _ in range(2):
            if self._writer.ident is not None:
                self._writer.join(_PATIENCE)
            self.save(corpus)

    def _write(self, path: Path, rows: Sequence[tuple[Key, Row]]) -> None:
        try:
            write_rows(path, rows)
        except OSError as error:
            reason = error.strerror or str(error)
            if self._failed != reason:  # the next batch will most likely meet the same
                self._failed = reason
                logger.warning(
                    "%s=%s cannot be written (%s): earlier responses will be lost when this "
                    "engine ends",
                    _OPTION,
                    name_of(path),
                    reason,
                )


def write_rows(path: Path, rows: Sequence[tuple[Key, Row]]) -> None:
    """Write a file that only the user may read, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    content = io.BytesIO()
    np.savez(
        content,
        keys=np.frombuffer(b"".join(key for key, _ in rows), np.uint8).reshape(-1, KEY_BYTES),
        sizes=np.array([len(row.tokens) for _, row in rows], np.int64),
        tokens=np.concatenate([np.empty(0, np.int32), *(row.tokens for _, row in rows)]),
    )
    write_whole(path, content.getvalue(), private=True)


def read_rows(path: Path) -> list[tuple[Key, np.ndarray]]:
    """What `write_rows` wrote: what each prompt is known by, and the tokens of the row.

    Raises:
        FileError: the file cannot be read, is damaged, another user's, or was not written so.
    """
    named = f"the history of drafts {name_of(path)}"
    content = read_bytes(path, "the history of drafts", most=_MOST_BYTES, own=True)
    try:
        packed = zipfile.ZipFile(io.BytesIO(content)).infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in packed):
            raise ValueError("it is compressed")  # to how much is not known
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            keys, sizes, tokens = arrays["keys"], arrays["sizes"], arrays["tokens"]
    except Exception as error:  # damage comes in any form, also as what takes too much memory
        raise FileError(f"{named} holds no responses ({error})") from error
    kinds = [(array.dtype, array.ndim) for array in (keys, sizes, tokens)]
    if (
        kinds != [(np.uint8, 2), (np.int64, 1), (np.int32, 1)]
        or keys.shape != (len(sizes), KEY_BYTES)
        or (sizes < 1).any()
        or sizes.sum() != len(tokens)
    ):
        raise FileError(f"{named} holds no responses (its arrays have other shapes)")
    starts = np.cumsum(sizes) - sizes
    if (tokens[starts] != BETWEEN_ROWS).any() or (tokens < BETWEEN_ROWS).any():
        raise FileError(f"{named} holds no responses (some tokens are none)")
    rows = np.split(tokens, starts[1:]) if len(starts) else []
    # Copies, or one row that is left would keep all of the file in memory.
    return [(key.tobytes(), row.copy()) for key, row in zip(keys, rows, strict=True)]
