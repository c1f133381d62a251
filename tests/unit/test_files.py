"""What PAT keeps is its user's alone, whole or not there, and no disk stops an engine."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pat_vllm import files
from pat_vllm.cli.profile import Partial
from pat_vllm.files import write_whole
from pat_vllm.predictor import kept
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.profiling import cache
from pat_vllm.profiling.profile import Profile, ProfileError
from pat_vllm.simulator.modelled.hardware import named_profile


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Files are as open as their maker lets them."""
    umask = os.umask(0)
    yield
    os.umask(umask)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return named_profile("llama-3.1-8b", "H100", 4)  # modelled


@pytest.fixture
def lengths() -> LengthModel:
    model = LengthModel(1000)
    for length in range(1, 33):
        model.finished(10 * length, True)
    model.end_of_batch()
    return model


def mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


# ---------------------------------------------------------------- the user's alone


def test_the_cache_of_profiles_is_the_users(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path / "pat"))
    path = cache.keep(profile)
    assert path is not None and cache.find(profile.key) == profile
    assert [mode(one) for one in (path, path.parent, tmp_path / "pat")] == [0o600, 0o700, 0o700]
    # What others may read is closed.
    path.parent.chmod(0o755)
    path.chmod(0o644)
    before = path.stat().st_ino
    assert cache.keep(profile) == path
    assert mode(path.parent) == 0o700 and mode(path) == 0o600
    assert path.stat().st_ino != before  # replaced
    assert os.listdir(path.parent) == [path.name]


def test_kept_lengths_are_the_users(tmp_path: Path, lengths: LengthModel) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("{}")
    before = path.stat().st_ino
    kept.save(path, lengths)
    assert mode(path) == 0o600
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["lengths.json"]


def test_a_profile_that_a_user_asks_for_is_as_open_as_other_files(
    tmp_path: Path, profile: Profile
) -> None:
    """`pat-vllm profile --output` makes them to be shared."""
    profile.save(tmp_path / "profile.json")
    assert mode(tmp_path / "profile.json") == 0o666


def test_a_file_that_another_puts_in_the_way_is_not_written_through(
    tmp_path: Path, lengths: LengthModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name that is to be replaced, nor that of the file which takes its place."""
    secret, path = tmp_path / "secret", tmp_path / "lengths.json"
    secret.write_text("kept")
    path.symlink_to(secret)
    kept.save(path, lengths)
    assert secret.read_text() == "kept" and not path.is_symlink()
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".lengths.json.guessed").symlink_to(secret)
    with pytest.raises(FileExistsError):
        kept.save(path, lengths)
    assert secret.read_text() == "kept"


# ---------------------------------------------------------------- full disks and bad files


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was kept before stays, one warning says why, and nothing is left behind."""
    path = tmp_path / "lengths.json"
    kept.save(path, lengths)
    before = path.read_bytes()
    policy = AdaptivePolicy(profile, bound=1000, lengths_file=path)
    for batch in range(1, 4):
        policy.finished(float(batch), 0, 50, True)
        with no_room(kind) as words:
            policy.idle(float(batch))  # where an engine's thread is when a batch has ended
        assert policy.report().batches == 1 + batch
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["lengths.json"]
    (warning,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert words in warning and str(path) in warning
    # When there is room again, all of it is kept.
    policy.finished(9.0, 0, 50, True)
    policy.idle(9.0)
    assert kept.load(path)[0].responses == lengths.responses + 4

    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path))
    caplog.clear()
    with no_room(kind) as words:
        assert cache.keep(profile) is None
    assert words in caplog.text and cache.CACHE_DIR in caplog.text
    assert not os.listdir(tmp_path / "profiles")
    assert cache.find(profile.key) is None


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


def test_an_engine_starts_where_the_cache_cannot_be_read(
    tmp_path: Path,
    profile: Profile,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal is imitated, as tests may run as a user for whom nothing is forbidden."""

    def unreadable(path: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path))
    path = cache.keep(profile)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", unreadable)
        assert cache.find(profile.key) is None
        assert str(path) in caplog.text and "Permission denied" in caplog.text
        patch.setattr(Path, "stat", unreadable)  # not even the directory
        assert cache.find(profile.key) is None


BAD = {
    "empty": b"",
    "cut off": b'{"format": 1, "bound": 10',
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "a directory": None,
    "something else": b'{"format": 1, "title": "a report"}',
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_named(kind: str, tmp_path: Path) -> None:
    content = BAD[kind]
    path = tmp_path / "it.json"
    partial = tmp_path / "it.json.part"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
        partial.write_bytes(content)
    with pytest.raises(ProfileError, match=r"it\.json"):
        Profile.load(path)
    with pytest.raises(ValueError, match=r"it\.json"):
        kept.load(path)
    if kind in ("cut off", "binary", "something else"):
        with pytest.raises(ProfileError, match=r"it\.json\.part"):
            Partial.open(partial, {"key": {}})
        assert partial.read_bytes() == content
