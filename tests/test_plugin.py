"""The vLLM plugin: nothing changes for who does not ask for PAT, and all ways to ask are alike."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pat_vllm
from pat_vllm.plugin import ALLOW_UNTESTED, check_vllm_version, register
from pat_vllm.text_only import PACKAGES, is_without_vision_and_audio
from tests.models import random_model

SCHEDULER = "pat_vllm.scheduler.scheduler.PATScheduler"
WORKER = "pat_vllm.worker.cpu_worker.PATCPUWorker"
WAYS_TO_ASK = ["pat", "pat_vllm.PATExecutor", "pat_vllm.executor.executor.PATExecutor", "class"]


@pytest.fixture
def executor() -> Any:
    """vLLM's `Executor`, with the plugin loaded."""
    from vllm.v1.executor.abstract import Executor

    register()
    return Executor


@pytest.fixture
def stock_get_class(executor: Any) -> Any:
    """`Executor.get_class` as vLLM has it."""
    original = executor.get_class.__wrapped__
    assert original.__module__ == "vllm.v1.executor.abstract"
    return original


def engine_config(backend: Any, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"tensor_parallel_size": 2, **options}
    return EngineArgs(
        model=str(random_model("qwen3")),
        max_model_len=512,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend=backend,
        **options,
    ).create_engine_config()


def resolve(backend: Any) -> Any:
    return pat_vllm.PATExecutor if backend == "class" else backend


def outcome(get_class: Any, backend: Any) -> Any:
    """The class that a backend resolves to, or the error."""
    parallel_config = SimpleNamespace(distributed_executor_backend=backend)
    try:
        return get_class(SimpleNamespace(parallel_config=parallel_config))
    except Exception as error:
        return type(error), str(error)


# ---------------------------------------------------------------- not asked for


def test_entry_point() -> None:
    """vLLM finds the plugin by itself."""
    (found,) = entry_points(group="vllm.general_plugins", name="pat")
    assert found.load() is register


def test_loading_twice_patches_once(executor: Any) -> None:
    patched = executor.get_class
    register()
    assert executor.get_class is patched
    assert not hasattr(patched.__wrapped__, "__wrapped__")


def test_log_lines_go_where_those_of_vllm_go(executor: Any) -> None:
    from vllm.logger import init_logger

    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, vllm, ours = Handler(), logging.getLogger("vllm"), init_logger("pat_vllm.some.module")
    level = vllm.level
    vllm.addHandler(handler)
    try:
        for name in ("INFO", "WARNING"):
            vllm.setLevel(name)
            ours.info("information at level %s", name)
            ours.warning("warning at level %s", name)
    finally:
        vllm.removeHandler(handler)
        vllm.setLevel(level)
    assert lines == [
        "information at level INFO",
        "warning at level INFO",
        "warning at level WARNING",
    ]


def stock_backends() -> list[Any]:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return [
        "mp",
        "uni",
        "ray",
        "external_launcher",
        UniProcExecutor,
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor",
        # Errors are vLLM's too.
        "no.such.Executor",
        "collections.OrderedDict",
        dict,
        None,
    ]


def test_stock_backends_resolve_as_without_the_plugin(executor: Any, stock_get_class: Any) -> None:
    classes = 0
    for backend in stock_backends():
        found = outcome(executor.get_class, backend)
        assert found == outcome(stock_get_class, backend), backend
        classes += isinstance(found, type)
    assert classes >= 5


@pytest.mark.parametrize("backend", ["mp", "uni", None])
def test_stock_configs_are_as_without_the_plugin(
    backend: str | None, executor: Any, stock_get_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole config, with options that PAT would refuse, and PAT's own, unread."""
    options: dict[str, Any] = dict(
        enable_lora=True,
        additional_config={"pat": {"unknown": 1}},
        tensor_parallel_size=1 if backend == "uni" else 2,
    )
    config = engine_config(backend, **options)
    monkeypatch.setattr(executor, "get_class", staticmethod(stock_get_class))
    stock = engine_config(backend, **options)

    assert str(config) == str(stock)
    assert config.compute_hash() == stock.compute_hash()
    assert config.parallel_config.worker_cls == stock.parallel_config.worker_cls
    assert "pat" not in config.parallel_config.worker_cls
    assert config.scheduler_config.scheduler_cls is None


IMPORTS = """
import sys

def new(names):
    return sorted({name.split(".")[0] for name in set(sys.modules) - set(names)})

import pat_vllm.plugin
heavy = {"torch", "vllm", "numpy", "pydantic"} & set(new(()))
assert not heavy, heavy

import vllm.v1.executor.abstract
before = set(sys.modules)
pat_vllm.plugin.register()
assert set(sys.modules) == before, set(sys.modules) - before

from types import SimpleNamespace
config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="mp"))
vllm.v1.executor.abstract.Executor.get_class(config)
ours = {name for name in sys.modules if name.startswith("pat_vllm")}
parts = {"patches", "patches.front_end", "patches.replacing", "plugin", "text_only"}
assert ours == {"pat_vllm", *("pat_vllm." + part for part in parts)}, ours
print("light")
"""


@pytest.mark.slow
def test_plugin_imports_nothing_that_vllm_has_not() -> None:
    """Neither its module nor loading it nor a stock engine imports the rest of PAT."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("light\n")


# ---------------------------------------------------------------- asked for


@pytest.fixture(scope="module")
def asked_for() -> dict[str, Any]:
    return {way: engine_config(resolve(way)) for way in WAYS_TO_ASK}


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_ways_to_ask_are_alike(way: str, asked_for: dict[str, Any], executor: Any) -> None:
    config = asked_for[way]
    assert config.parallel_config.worker_cls == WORKER
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert executor.get_class(config) is pat_vllm.PATExecutor
    # That prepared the config again, as vLLM does several times: nothing changes.
    assert config.parallel_config.worker_cls == WORKER
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.parallel_config.use_ray is False
    assert config.parallel_config.world_size == 2


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_all_ways_are_checked(way: str) -> None:
    with pytest.raises(ValueError, match="unknown option 'no'"):
        engine_config(resolve(way), additional_config={"pat": {"no": 1}})


def test_subclasses_are_prepared_too() -> None:
    """Who extends the executor need not repeat what belongs to it."""

    class Mine(pat_vllm.PATExecutor):
        pass

    config = engine_config(Mine)
    assert config.parallel_config.worker_cls == WORKER
    assert config.scheduler_config.scheduler_cls == SCHEDULER


# ---------------------------------------------------------------- versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets vLLM's version; the override is unset."""
    import vllm.version

    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    yield lambda version: monkeypatch.setattr(vllm.version, "__version__", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc2", "0.33.0.dev7"])
def test_tested_versions(version: str, installed: Any) -> None:
    installed(version)
    check_vllm_version()


@pytest.mark.parametrize("version", ["0.9.2", "0.31.4", "0.34.0", "0.34.0rc1", "1.32.0", "dev", ""])
def test_other_versions_are_refused(
    version: str, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what is installed, what is tested, and the override, which works."""
    installed(version)
    wanted = rf">= 0\.32, < 0\.34, but vLLM {version} is installed.*{ALLOW_UNTESTED}=1"
    with pytest.raises(ValueError, match=wanted.replace("+", r"\+")):
        check_vllm_version()
    monkeypatch.setenv(ALLOW_UNTESTED, "0")
    with pytest.raises(ValueError, match="is tested with"):
        check_vllm_version()
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    check_vllm_version()


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_an_engine_on_another_version_is_refused(way: str, installed: Any) -> None:
    """Only where PAT is asked for."""
    installed("0.99.0")
    with pytest.raises(ValueError, match=r"vLLM 0\.99\.0 is installed"):
        engine_config(resolve(way))
    assert engine_config("mp").scheduler_config.scheduler_cls is None


def test_vllm_looks_at_models_without_what_commands_do_without(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which pip's torchvision, for another torch, would end."""
    from vllm.model_executor.models import registry

    stock = [sys.executable, "-m", registry.__name__]
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", stock)
    for name in PACKAGES:  # or an earlier test has run a command
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not is_without_vision_and_audio()
    register()
    assert registry._SUBPROCESS_COMMAND is stock
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('for another torch')")
    register()
    *command, module = registry._SUBPROCESS_COMMAND
    assert module == registry.__name__
    (tmp_path / "some.py").write_text("import sys; print(__name__, sys.modules['torchvision'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run([*command, "some"], capture_output=True, text=True)
    assert done.stdout == "__main__ None\n", done.stderr
