"""What is read is bounded and whole, what PAT keeps is its user's alone, and no disk stops an
engine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import random
import resource
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.advice.lengths import read_rollouts
from pat_vllm.doctor.report import names_of_this_machine
from pat_vllm.drafts.corpus import Corpus, key_of
from pat_vllm.drafts.history_file import HistoryFile
from pat_vllm.files import reading
from pat_vllm.files import writing as files
from pat_vllm.files.reading import SET_ASIDE
from pat_vllm.files.writing import write_whole
from pat_vllm.modelled.hardware import modelled_profile
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.length_model import LengthModel
from pat_vllm.profile import Profile
from pat_vllm.profiling import cache
from pat_vllm.reporting import Report
from pat_vllm.simulator.traces import load_trace
from tests.unit.predictor.examples import some_lengths


@pytest.fixture(autouse=True)
def open_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are as open as their maker lets them, and the cache is empty."""
    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path / "pat"))
    umask = os.umask(0)
    yield
    os.umask(umask)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return modelled_profile("llama-3.1-8b", "H100", 4)  # modelled


@pytest.fixture
def lengths() -> LengthModel:
    return some_lengths()


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


READERS: dict[str, Callable[[Path], Any]] = {
    "profile": Profile.load,
    "lengths_file": learned_state.load,
    "report": Report.load,
    "trace": load_trace,
    "rollouts": read_rollouts,
    "model config": lambda path: modelled_profile(str(path), "H100", 2),
}
KINDS = ("empty", "cut off", "binary", "deep", "another's", "digits", "surrogate", "a directory")
WORDS = {"a pipe": "no regular file", "a device": "no regular file", "too large": "bytes; at most"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [*KINDS, *WORDS])
def test_what_is_no_file_of_ours_is_named(kind: str, tmp_path: Path) -> None:
    """By every reader, and none of them blocks or reads without end."""
    path = tmp_path / "config.json"
    make(kind, path)
    for name, read in READERS.items():
        with pytest.raises(ValueError) as error:
            read(path)
        assert "config.json" in str(error.value) or kind == "another's", (name, error.value)
        assert WORDS.get(kind, "") in str(error.value), name
        assert len(str(error.value)) < 1000, name


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_names_that_no_file_can_have(
    name: str, lengths: LengthModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Are refused at start (tests/unit/test_config.py); if not, they stop no engine."""
    for read in READERS.values():
        with pytest.raises((ValueError, OSError)):
            read(Path(name) / "x")
    state_file = learned_state.LearnedStateFile(Path(name))
    state_file.save(lengths, None)
    state_file.save(lengths, None)
    assert len(caplog.records) == 1 and "lengths_file" in caplog.text


def test_no_damage_to_lengths_is_taken(
    tmp_path: Path, lengths: LengthModel, caplog: pytest.LogCaptureFixture
) -> None:
    """As of profiles: whatever is cut off, or which bit is flipped."""
    path, draw = tmp_path / "lengths.json", random.Random(1)
    learned_state.save(path, lengths, Acceptance((0, 2)))
    whole = path.read_bytes()
    for _ in range(400):
        at, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        flipped = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        for damaged in (whole[:at], flipped):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"lengths\.json"):
                learned_state.load(path)
    # Nor what no engine can have seen, by whomever it was written.
    content = json.loads(whole)
    del content["digest"]
    wrong: list[dict[str, Any]] = [
        {"ends": [1e308], "tokens": [1e308]},
        {"ends": ["1"], "tokens": [2]},
    ]
    wrong += [{"bound": True}, {"batches": -1}, {"bound": 10**400}, {"colour": 1}, {"format": 9}]
    for fields in (*wrong, {"acceptance": {"format": 1, "tried": [1e308], "succeeded": [1]}}):
        changed = {**content, **fields}
        path.write_text(json.dumps({"digest": learned_state._digest(changed), **changed}))
        with pytest.raises(ValueError, match=r"lengths\.json"):
            learned_state.load(path)


def keep_lengths(path: Path) -> bool:
    """As an engine: read, and write what is learnt; whether nothing was found."""
    state_file = learned_state.LearnedStateFile(path)
    model, acceptance = state_file.load(1000, (0, 2))
    state_file.save(some_lengths(), acceptance)
    return model.responses == 0


def keep_responses(path: Path) -> bool:
    file, corpus = HistoryFile(path, 512), Corpus(1 << 20)
    file.load(corpus)
    loaded = corpus.num_bytes
    corpus.add(key_of([1]), [7, 8], [9])
    file.close(corpus)
    return loaded == 0


KEEPERS = {"lengths_file": keep_lengths, "draft_history_file": keep_responses}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("option", KEEPERS)
@pytest.mark.parametrize("kind", [*KINDS, *WORDS])
def test_what_an_engine_cannot_read_of_its_own_is_set_aside(
    kind: str, option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts afresh and keeps what it learns. What no engine has made stays as it is."""
    path, aside = tmp_path / "kept", tmp_path / f"kept{SET_ASIDE}"
    make(kind, path)
    is_file = path.is_file()
    assert KEEPERS[option](path)
    first = caplog.records[0].message
    assert option in first and "the engine starts without it" in first
    assert aside.exists() == is_file == (SET_ASIDE in first)
    assert is_file or "cannot be written" in caplog.text
    caplog.clear()
    assert KEEPERS[option](path) != is_file
    assert path.exists() and bool(caplog.records) != is_file


@pytest.mark.parametrize("option", KEEPERS)
def test_no_permission_stops_no_engine(
    option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither to read its own file, nor to rename it. Imitated, as tests may run as root."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    path = tmp_path / "kept"
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(os, "replace", refuse)
        assert KEEPERS[option](path)
    read, written = (record.message for record in caplog.records)
    assert "cannot be read: Permission denied; it cannot be renamed (Permission denied)" in read
    assert "cannot be written" in written
    assert os.listdir(tmp_path) == ["kept"]


# ---------------------------------------------------------------- the user's alone


def test_the_cache_of_profiles_is_the_users(tmp_path: Path, profile: Profile) -> None:
    path = cache.keep(profile)
    assert path is not None and cache.find(profile.key) == profile
    assert [mode(entry) for entry in (path, path.parent, tmp_path / "pat")] == [0o600, 0o700, 0o700]
    # What others may read is closed.
    path.parent.chmod(0o755)
    path.chmod(0o644)
    before = path.stat().st_ino
    assert cache.keep(profile) == path
    assert mode(path.parent) == 0o700 and mode(path) == 0o600
    assert path.stat().st_ino != before  # replaced
    assert os.listdir(path.parent) == [path.name]


def test_a_cache_of_another_user_is_left_alone(
    tmp_path: Path,
    profile: Profile,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = cache.keep(profile)
    assert path is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert cache.find(profile.key) is None and "is another user's" in caplog.text
        caplog.clear()
        assert cache.keep(profile) is None and "is another user's" in caplog.text
    theirs = tmp_path / "theirs"
    theirs.mkdir(0o755)
    path.parent.rename(tmp_path / "before")
    path.parent.symlink_to(theirs)
    assert cache.keep(profile) is None and "it is a link" in caplog.text
    assert mode(theirs) == 0o755 and not os.listdir(theirs)


def test_kept_lengths_are_the_users(
    tmp_path: Path, lengths: LengthModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another puts in the way is not written through: neither the name that is to be
    replaced, nor that of the file which takes its place."""
    secret, path = tmp_path / "secret", tmp_path / "lengths.json"
    secret.write_text("kept")
    path.symlink_to(secret)
    learned_state.save(path, lengths)
    assert secret.read_text() == "kept" and not path.is_symlink()
    assert mode(path) == 0o600 and sorted(os.listdir(tmp_path)) == ["lengths.json", "secret"]
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".lengths.json.guessed").symlink_to(secret)
    with pytest.raises(FileExistsError):
        learned_state.save(path, lengths)
    assert secret.read_text() == "kept"


def test_files_that_users_ask_for_are_as_open_as_others(tmp_path: Path, profile: Profile) -> None:
    """`pat-vllm profile --output` makes them to be shared. No device becomes one."""
    profile.save(tmp_path / "profile.json")
    assert mode(tmp_path / "profile.json") == 0o666
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file"):
        write_whole(pipe, "text")
    assert pipe.is_fifo()


def test_what_killed_writers_have_left_is_removed(tmp_path: Path, profile: Profile) -> None:
    """Of the file that is written, and of all in the cache; not what is being written, nor what
    only looks alike."""
    path = cache.keep(profile)
    assert path is not None
    left = [f".it.{'0' * 16}", f".it.{'1' * 16}", f".it.{'2' * 17}", f".other.{'3' * 16}"]
    for directory, save in (
        (tmp_path, lambda: write_whole(tmp_path / "it", "new")),
        (path.parent, lambda: cache.keep(profile)),
    ):
        for name in left:
            (directory / name).touch()
        for name in (left[0], *left[2:]):
            os.utime(directory / name, (0, 0))
        save()
        expected = left[1:] if directory == tmp_path else left[1:3]
        assert {entry for entry in os.listdir(directory) if entry.startswith(".")} == {*expected}


# ---------------------------------------------------------------- what stops no engine


@contextlib.contextmanager
def no_room(kind: str) -> Iterator[str]:
    """Files cannot be written; the operating system's words for it."""
    if kind == "too large":
        # The kernel's own refusal, after some of the file has been written.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            yield os.strerror(errno.EFBIG)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    code, name = {"full": (errno.ENOSPC, "replace"), "read-only": (errno.EROFS, "open")}[kind]

    def refuse(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, name, refuse)
        yield os.strerror(code)


@pytest.mark.parametrize("kind", ["too large", "full", "read-only"])
def test_an_engine_goes_on_where_the_disk_is_full(
    kind: str,
    tmp_path: Path,
    profile: Profile,
    lengths: LengthModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was kept before stays, one warning says why, and nothing is left behind."""
    path = tmp_path / "lengths.json"
    learned_state.save(path, lengths)
    before = path.read_bytes()
    policy = AdaptivePolicy(profile, bound=1000, lengths_file=path)
    for batch in range(1, 4):
        policy.finished(float(batch), 50, True)
        with no_room(kind) as words:
            policy.idle(float(batch))  # where an engine's thread is when a batch has ended
        assert policy.report().batches == 1 + batch
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["lengths.json"]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert words in warning and str(path) in warning
    # When there is room again, all of it is kept.
    policy.finished(9.0, 50, True)
    policy.idle(9.0)
    assert learned_state.load(path)[0].responses == lengths.responses + 4

    caplog.clear()
    with no_room(kind) as words:
        assert cache.keep(profile) is None
    assert words in caplog.text and cache.CACHE_DIR in caplog.text
    assert not (tmp_path / "pat" / "profiles").exists() or not os.listdir(tmp_path / "pat/profiles")
    assert cache.find(profile.key) is None


def nobody(number: int) -> Any:
    raise KeyError(number)


@pytest.mark.parametrize("kind", ["no home", "another's home", "no permission"])
def test_an_engine_starts_where_there_is_no_cache(
    kind: str,
    tmp_path: Path,
    profile: Profile,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a container's user that has no entry in /etc/passwd."""
    if kind == "no home":
        for name in (cache.CACHE_DIR, "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        assert "~" not in names_of_this_machine().values()
    elif kind == "another's home":
        monkeypatch.setenv(cache.CACHE_DIR, "~nosuch")
    else:
        assert cache.keep(profile) is not None
        # Imitated, as tests may run as a user for whom nothing is forbidden.

        def refuse(path: Any, flags: int, *mode: Any, **options: Any) -> Any:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(reading.os, "open", refuse)
    assert cache.find(profile.key) is None and cache.keep(profile) is None
    assert len(caplog.records) == 2 and cache.CACHE_DIR in caplog.text


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


def test_engines_may_share_a_file_and_the_cache(
    tmp_path: Path, profile: Profile, lengths: LengthModel
) -> None:
    """Each finds the whole of what one of them has kept last."""
    path = tmp_path / "lengths.json"

    def engine(number: int) -> None:
        for _ in range(20):
            learned_state.save(path, lengths, Acceptance(range(2 + number)))
            assert learned_state.load(path)[0].responses == lengths.responses
            assert cache.keep(profile) and cache.find(profile.key) == profile

    with ThreadPoolExecutor(3) as engines:
        list(engines.map(engine, range(3)))
    assert sorted(os.listdir(tmp_path)) == ["lengths.json", "pat"]
