"""Nothing read is unpickled, what PAT keeps is its user's alone, and HTTP commands are closed."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pat_vllm import commands, files
from pat_vllm.cli.profile import Partial
from pat_vllm.files import make_private, write_whole
from pat_vllm.predictor import kept
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.profiling import cache
from pat_vllm.profiling.profile import Profile, ProfileError
from pat_vllm.simulator.modelled.hardware import named_profile
from tests.support.mutation import mutated

ROOT = Path(__file__).parents[1]
SHIPPED = ("pat_vllm", "integrations")

# ---------------------------------------------------------------- nothing is unpickled

RUN_CODE = {
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
    "_pickle",
}
"""Modules that make objects, and may run code, of what they read."""
LOADERS = {
    # torch.load unpickles; numpy's and pandas' may; yaml's may make any object.
    "allow_pickle",
    "from_pickle",
    "read_pickle",
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
}
CALLS_OF_THE_USER = {
    "pat_vllm/executor/executor.py": {"import cloudpickle", "cloudpickle.dumps(method)"},
    "pat_vllm/worker/worker.py": {"import cloudpickle", "cloudpickle.loads(method)"},
}
"""A function that who runs the engine hands to its workers: it travels between processes of this
engine, as in vLLM, and comes from no file."""


def loading(source: str) -> set[str]:
    """What in a module could make objects of what is read, as text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if {n.name.split(".")[0] for n in names} & RUN_CODE:
                found.add(ast.unparse(node))
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in RUN_CODE:
                found.add(ast.unparse(node))
            case ast.ImportFrom(module=str(module), names=names):
                if {f"{module}.{one.name}" for one in names} & LOADERS:
                    found.add(ast.unparse(node))
            case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__")):
                found.add(ast.unparse(node))
            case ast.Call(func=function, keywords=words):
                name = ast.unparse(function)
                called = {name, name.split(".")[-1], *(str(one.arg) for one in words)}
                if name.split(".")[0] in RUN_CODE or called & LOADERS:
                    found.add(ast.unparse(node))
    return found


def test_nothing_that_is_read_is_unpickled() -> None:
    found = {}
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*.py"):
            if here := loading(path.read_text()):
                found[str(path.relative_to(ROOT))] = here
    assert found == CALLS_OF_THE_USER


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy as np\nnp.load(path)",
        "torch.load(path, weights_only=True)",
        "from torch import load",
        "frame(path, allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
        "__import__('pickle')",
        "frame.read_pickle(path)",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert loading(source)


# ---------------------------------------------------------------- the user's alone


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Files are as open as their maker lets them."""
    umask = os.umask(0)
    yield
    os.umask(umask)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return named_profile("llama-3.1-8b", "H100", 4)  # modelled


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def learnt() -> LengthModel:
    model = LengthModel(1000)
    for length in range(1, 33):
        model.finished(10 * length, True)
    model.end_of_batch()
    return model


def check_cache(tmp_path: Path, profile: Profile) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.CACHE_DIR, str(tmp_path / "pat"))
        path = cache.keep(profile)
        assert path is not None and cache.find(profile.key) == profile
        assert mode(path) == 0o600
        assert mode(path.parent) == 0o700 and mode(tmp_path / "pat") == 0o700
        # As versions before made it.
        path.parent.chmod(0o755)
        path.chmod(0o644)
        before = path.stat().st_ino
        assert cache.keep(profile) == path
        assert mode(path.parent) == 0o700 and mode(path) == 0o600
        assert path.stat().st_ino != before  # replaced
        assert os.listdir(path.parent) == [path.name]


def check_lengths(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("{}")
    before = path.stat().st_ino
    kept.save(path, learnt())
    assert mode(path) == 0o600
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["lengths.json"]


@pytest.mark.parametrize("check", [check_cache, check_lengths])
def test_kept_files_are_the_users(
    check: Callable[..., None], tmp_path: Path, profile: Profile
) -> None:
    check(tmp_path, profile)


@pytest.mark.parametrize(
    ("check", "function", "changes"),
    [
        (check_cache, cache.keep, {", private=True": ""}),
        (check_cache, cache.keep, {"make_private(path.parent)": "path.parent.mkdir()"}),
        (check_cache, make_private, {"directory.chmod(0o700)": "pass"}),
        (check_lengths, kept.save, {", private=True": ""}),
        (check_lengths, write_whole, {"0o600 if private else 0o666": "0o666"}),
        (check_lengths, write_whole, {"os.replace(scratch, path)": "path.write_text(text)"}),
    ],
)
def test_mistakes_are_seen(
    check: Callable[..., None],
    function: Any,
    changes: dict[str, str],
    tmp_path: Path,
    profile: Profile,
) -> None:
    with mutated(function, changes), pytest.raises((AssertionError, FileExistsError)):
        check(tmp_path, profile)


def test_a_profile_that_a_user_asks_for_is_as_open_as_other_files(
    tmp_path: Path, profile: Profile
) -> None:
    """`pat-vllm profile --output` makes them to be shared."""
    profile.save(tmp_path / "profile.json")
    assert mode(tmp_path / "profile.json") == 0o666


def test_a_file_that_another_puts_in_the_way_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name that is to be replaced, nor that of the file which takes its place."""
    secret = tmp_path / "secret"
    secret.write_text("kept")
    path = tmp_path / "lengths.json"
    path.symlink_to(secret)
    kept.save(path, learnt())
    assert secret.read_text() == "kept" and not path.is_symlink()
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".lengths.json.guessed").symlink_to(secret)
    with pytest.raises(FileExistsError):
        kept.save(path, learnt())
    assert secret.read_text() == "kept"


def test_shared_memory_is_the_users() -> None:
    """Of a rank's segment; vLLM's own in /dev/shm is made by Python, 0600."""
    from pat_vllm.kv_transfer.shared_memory import _Segment

    segment = _Segment.create()
    assert segment is not None
    path, name = segment.address.split()
    assert mode(path) == 0o600
    assert name not in os.listdir("/dev/shm")
    # Others reach it through this directory only.
    assert mode(Path(path).parent) == 0o500
    other = _Segment.attach(segment.address)
    assert other is not None
    segment.resize(1 << 20)
    other.follow()
    assert mode(path) == 0o600


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
    code = {"full": errno.ENOSPC, "read-only": errno.EROFS, "quota": errno.EDQUOT}[kind]

    def refuse(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    name = "open" if kind == "read-only" else "replace"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, name, refuse)
        yield os.strerror(code)


def check_full_disk(
    kind: str, tmp_path: Path, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lengths.json"
    kept.save(path, learnt())
    before = path.read_bytes()
    policy = AdaptivePolicy(profile, bound=1000, lengths_file=path)
    for batch in range(1, 4):
        policy.finished(float(batch), 0, 50, True)
        with no_room(kind) as words:
            policy.idle(float(batch))  # where an engine's thread is when a batch has ended
        assert policy.report().batches == 1 + batch
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["lengths.json"]
    (told,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert words in told and str(path) in told
    # When there is room again, all of it is kept.
    policy.finished(9.0, 0, 50, True)
    policy.idle(9.0)
    assert kept.load(path)[0].responses == learnt().responses + 4


@pytest.mark.parametrize("kind", ["too large", "full", "read-only", "quota"])
def test_an_engine_goes_on_where_the_disk_is_full(
    kind: str, tmp_path: Path, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    check_full_disk(kind, tmp_path, profile, caplog)


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (kept.save, {"write_whole(path, ": "path.write_text(", ", private=True": ""}),
        (write_whole, {"os.unlink(scratch)": "pass"}),
    ],
)
def test_worse_ends_are_seen(
    function: Any,
    changes: dict[str, str],
    tmp_path: Path,
    profile: Profile,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with mutated(function, changes), pytest.raises((AssertionError, OSError, ValueError)):
        check_full_disk("too large", tmp_path, profile, caplog)


def check_loss_of_power(path: Path) -> None:
    """All of a file is on the disk before it takes its name."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def writes_out(descriptor: int) -> None:
        calls.append(("on disk", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def takes_its_name(scratch: Path, path: Path) -> None:
        calls.append(("named", scratch.stat().st_size))
        replace(scratch, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", writes_out)
        patch.setattr(files.os, "replace", takes_its_name)
        write_whole(path, "some")
    assert calls == [("on disk", 4), ("named", 4)]


def test_a_loss_of_power_leaves_no_empty_file(tmp_path: Path) -> None:
    check_loss_of_power(tmp_path / "file")


@pytest.mark.parametrize(
    "changes", [{"os.fsync(descriptor)": "pass"}, {"file.flush()": "pass"}], ids=str
)
def test_files_that_are_not_written_out_are_seen(changes: dict[str, str], tmp_path: Path) -> None:
    with mutated(write_whole, changes), pytest.raises(AssertionError):
        check_loss_of_power(tmp_path / "file")


@pytest.mark.parametrize("kind", ["too large", "full", "read-only", "quota"])
def test_an_engine_starts_where_the_disk_is_full(
    kind: str, tmp_path: Path, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.CACHE_DIR, str(tmp_path))
        with no_room(kind) as words:
            assert cache.keep(profile) is None
        assert words in caplog.text and cache.CACHE_DIR in caplog.text
        assert not os.listdir(tmp_path / "profiles")
        assert cache.find(profile.key) is None


def unreadable(path: Path, *args: Any, **options: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_an_engine_starts_where_the_cache_cannot_be_read(
    tmp_path: Path, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests may run as a user for whom nothing is forbidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.CACHE_DIR, str(tmp_path))
        path = cache.keep(profile)
        patch.setattr(Path, "read_text", unreadable)
        assert cache.find(profile.key) is None
        assert f"{path} cannot be read: Permission denied" in caplog.text
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


def put(path: Path, content: bytes | None) -> Path:
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_named(kind: str, tmp_path: Path) -> None:
    profile, lengths = (put(tmp_path / name, BAD[kind]) for name in ("p.json", "l.json"))
    with pytest.raises(ProfileError, match=r"p\.json"):
        Profile.load(profile)
    with pytest.raises(ValueError, match=r"l\.json"):
        kept.load(lengths)


@pytest.mark.parametrize("kind", ["cut off", "binary", "something else"])
def test_a_bad_unfinished_profile_is_named(kind: str, tmp_path: Path) -> None:
    path = put(tmp_path / "p.json.part", BAD[kind])
    with pytest.raises(ProfileError, match=r"p\.json\.part is no unfinished profile"):
        Partial.open(path, {"key": {}})
    assert path.read_bytes() == BAD[kind]


# ---------------------------------------------------------------- over HTTP


def routes(dev_mode: bool) -> set[str]:
    """Paths that `vllm serve` answers, its default flags given."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", str(int(dev_mode)))
        app = build_app(arguments, ("generate",), None)
    return {route.path for route in app.routes if hasattr(route, "path")}


PAT_COMMANDS = {getattr(commands, name) for name in dir(commands) if name.endswith("_COMMAND")}


@pytest.mark.slow
@pytest.mark.beside
def test_commands_are_closed_by_default() -> None:
    """They are reached as `collective_rpc` alone, which vLLM serves in its development mode."""
    from vllm import envs

    envs.disable_envs_cache()
    closed = routes(dev_mode=False)
    assert "/v1/completions" in closed
    of_engine = {"/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights"}
    assert not closed & of_engine
    assert not [path for path in closed if "pat" in path.replace("path", "").split("/")]
    assert not [path for path in closed if any(name in path for name in PAT_COMMANDS)]
    assert routes(dev_mode=True) >= of_engine


@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.parametrize("method", ["not a method", "gASVCAAAAAAAAACMBG5vcGWULg=="])
def test_json_cannot_carry_a_pickled_function(method: str) -> None:
    """In development mode a method's name comes as text, which is looked up, never unpickled."""
    from pat_vllm.worker.worker import PATWorkerMixin

    worker: Any = SimpleNamespace()
    body = json.loads(json.dumps({"args": [method, [], {}]}))
    with pytest.raises(AttributeError):
        PATWorkerMixin.pat_call_in_base(worker, *body["args"])
