"""What is read is bounded and whole, what PAT keeps is its user's alone, and no disk stops an
engine."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor.report import names_of_this_machine
from pat_vllm.drafts.corpus import Corpus, key_of
from pat_vllm.drafts.history_file import HistoryFile
from pat_vllm.files import writing as files
from pat_vllm.files.kept import SET_ASIDE, KeptFile
from pat_vllm.files.writing import write_whole
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.learned_state import LearnedState
from pat_vllm.profile import Profile
from pat_vllm.profiling import cache
from pat_vllm.reporting import Report
from tests.unit.predictor.examples import some_lengths, two_ranks


@pytest.fixture(autouse=True)
def open_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are as open as their maker lets them, and the cache is empty."""
    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path / "pat"))
    umask = os.umask(0)
    yield
    os.umask(umask)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return two_ranks()


def mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


# ---------------------------------------------------------------- what is read


def make(kind: str, path: Path) -> None:
    """Something at `path` that is no file of PAT's."""
    contents = {"empty": b"", "cut off": b'{"format": 1', "binary": bytes(range(256))}
    contents |= {"deep": b"[" * 100_000, "another's": b'{"format": 1, "title": "x"}'}
    contents |= {"digits": b"9" * 5000, "surrogate": b'{"a": "\\ud800"}'}
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "too large":
        path.touch()
        os.truncate(path, 1 << 40)


KINDS = ("empty", "cut off", "binary", "deep", "another's", "digits", "surrogate", "a directory")
WORDS = {"a pipe": "no regular file", "a device": "no regular file", "too large": "bytes; at most"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [*KINDS, *WORDS])
def test_what_is_no_file_of_ours_is_named(kind: str, tmp_path: Path) -> None:
    """By every reader, and none of them blocks or reads without end."""
    path = tmp_path / "file.json"
    make(kind, path)
    for read in (Profile.load, learned_state.load, Report.load):
        with pytest.raises(ValueError, match=r"file\.json") as error:
            read(path)
        assert WORDS.get(kind, "") in str(error.value) and len(str(error.value)) < 1000


def keep_lengths(state_dir: Path) -> bool:
    """As an engine: read, and write what is learnt; whether nothing was found."""
    state = LearnedState(state_dir)
    model, acceptance = state.load(1000, (0, 2))
    state.save(some_lengths(), acceptance)
    return model.responses == 0


def keep_responses(state_dir: Path) -> bool:
    file, corpus = HistoryFile(state_dir, 512), Corpus(1 << 20)
    salt = file.load(corpus)
    corpus.add(key_of([1]), [7, 8], [9])
    file.close(corpus)
    return salt == 0


KEEPERS: dict[str, Callable[[Path], bool]] = {
    "learnt.json": keep_lengths,
    "responses.npz": keep_responses,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.parametrize("kind", [*KINDS, *WORDS])
def test_what_an_engine_cannot_read_of_its_own_is_set_aside(
    kind: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts afresh and keeps what it learns. What no engine has made stays as it is."""
    path, aside = tmp_path / name, tmp_path / f"{name}{SET_ASIDE}"
    make(kind, path)
    is_file = path.is_file()
    assert KEEPERS[name](tmp_path)
    first = caplog.records[0].message
    assert name in first and "the engine starts without it" in first
    assert aside.exists() == is_file == (SET_ASIDE in first)
    assert is_file or "cannot be written" in caplog.text
    caplog.clear()
    assert KEEPERS[name](tmp_path) != is_file
    assert path.exists() and bool(caplog.records) != is_file


# ---------------------------------------------------------------- what is written


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses to write more than some bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_engine_goes_on_where_the_disk_is_full(
    tmp_path: Path, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    """What was kept before stays, one warning says why, and nothing is left behind."""
    file = KeptFile(tmp_path / "state", "kept", "what is kept")
    file.write("before")
    with full_disk():
        file.write("a" * 1000)
        file.write("b" * 1000)
        assert cache.keep(profile) is None
    assert file.path is not None and file.path.read_text() == "before"
    assert os.listdir(tmp_path / "state") == ["kept"]
    mine, of_cache = [record.message for record in caplog.records]
    assert os.strerror(errno.EFBIG) in mine and str(file.path) in mine
    assert "what is kept will be lost" in mine and cache.CACHE_DIR in of_cache
    file.write("when there is room again")
    assert file.path.read_text() == "when there is room again"
    assert cache.find(profile.key) is None


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_name_that_no_file_can_have_stops_no_engine(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for keep in KEEPERS.values():
        assert keep(tmp_path / name)
    assert len(caplog.records) == 2 and caplog.text.count("cannot be written") == 2


def test_what_is_kept_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another puts in the way is not written through: neither the name that is to be
    replaced, nor that of the file which takes its place."""
    KeptFile(tmp_path / "state", "kept", "it").write("text")
    assert [mode(tmp_path / name) for name in ("state", "state/kept")] == [0o700, 0o600]
    secret, path = tmp_path / "secret", tmp_path / "kept"
    secret.write_text("secret")
    path.symlink_to(secret)
    write_whole(path, "text", private=True)
    assert secret.read_text() == "secret" and not path.is_symlink() and mode(path) == 0o600
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".kept.guessed").symlink_to(secret)
    with pytest.raises(FileExistsError):
        write_whole(path, "other", private=True)
    assert secret.read_text() == "secret"


def test_files_that_users_ask_for_are_as_open_as_others(tmp_path: Path) -> None:
    """They are made to be shared. No device becomes one."""
    write_whole(tmp_path / "file", "text")
    assert mode(tmp_path / "file") == 0o666
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file"):
        write_whole(pipe, "text")
    assert pipe.is_fifo()


def test_what_killed_writers_have_left_is_removed(tmp_path: Path) -> None:
    """Not what is being written, nor what only looks alike."""
    left = [f".it.{'0' * 16}", f".it.{'1' * 16}", f".it.{'2' * 17}", f".other.{'3' * 16}"]
    for name in left:
        (tmp_path / name).touch()
    for name in (left[0], *left[2:]):
        os.utime(tmp_path / name, (0, 0))
    write_whole(tmp_path / "it", "new")
    assert {*os.listdir(tmp_path)} == {"it", *left[1:]}


def test_a_loss_of_power_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a file is on the disk before it takes its name."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def writes_out(descriptor: int) -> None:
        calls.append(("on disk", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def takes_its_name(scratch: Path, path: Path) -> None:
        calls.append(("named", scratch.stat().st_size))
        replace(scratch, path)

    monkeypatch.setattr(files.os, "fsync", writes_out)
    monkeypatch.setattr(files.os, "replace", takes_its_name)
    write_whole(tmp_path / "file", "some")
    assert calls == [("on disk", 4), ("named", 4)]


# ---------------------------------------------------------------- the cache of profiles


def test_the_cache_of_profiles_is_the_users(
    tmp_path: Path,
    profile: Profile,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = cache.keep(profile)
    assert path is not None and cache.find(profile.key) == profile
    assert [mode(entry) for entry in (path, path.parent, tmp_path / "pat")] == [0o600, 0o700, 0o700]
    path.parent.chmod(0o755)  # what others may read is closed
    path.chmod(0o644)
    assert cache.keep(profile) == path
    assert mode(path.parent) == 0o700 and mode(path) == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert cache.find(profile.key) is None and cache.keep(profile) is None
        assert caplog.text.count("is another user's") == 2
    theirs = tmp_path / "theirs"
    theirs.mkdir(0o755)
    path.parent.rename(tmp_path / "before")
    path.parent.symlink_to(theirs)
    assert cache.keep(profile) is None and "it is a link" in caplog.text
    assert mode(theirs) == 0o755 and not os.listdir(theirs)


def nobody(number: int) -> Any:
    raise KeyError(number)


@pytest.mark.parametrize("kind", ["no home", "another's home"])
def test_an_engine_starts_where_there_is_no_cache(
    kind: str,
    profile: Profile,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a container's user that has no entry in /etc/passwd."""
    monkeypatch.setenv(cache.CACHE_DIR, "~nosuch")
    if kind == "no home":
        for name in (cache.CACHE_DIR, "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        assert "~" not in names_of_this_machine().values()
    assert cache.find(profile.key) is None and cache.keep(profile) is None
    assert len(caplog.records) == 2 and cache.CACHE_DIR in caplog.text
