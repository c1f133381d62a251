"""The vLLM plugin: nothing changes for who does not ask for PAT, and all ways to ask are alike."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import pat_vllm
from pat_vllm.plugin import ALLOW_UNTESTED, check_vllm_version, register
from pat_vllm.predictor.draft_schedule import ngram_config
from tests.support.models import random_model

SCHEDULER = "pat_vllm.scheduler.scheduler.PATScheduler"
WORKER = "pat_vllm.worker.cpu_worker.PATCPUWorker"
WAYS_TO_ASK = ["pat", "pat_vllm.PATExecutor", "class", "subclass"]


@pytest.fixture
def executor() -> Any:
    """vLLM's `Executor`, with the plugin loaded."""
    from vllm.v1.executor.abstract import Executor

    register()
    return Executor


def engine_config(backend: Any, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    if backend == "class":
        backend = pat_vllm.PATExecutor
    elif backend == "subclass":  # Who extends the executor need not repeat what belongs to it.
        backend = type("Mine", (pat_vllm.PATExecutor,), {})
    options = {"tensor_parallel_size": 2, **options}
    return EngineArgs(
        model=str(random_model("qwen3")),
        max_model_len=512,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend=backend,
        **options,
    ).create_engine_config()


# ---------------------------------------------------------------- not asked for


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


@pytest.mark.parametrize("backend", ["mp", None])
def test_stock_configs_are_as_without_the_plugin(
    backend: str | None, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole config, with options that PAT would refuse, and PAT's own, unread."""
    patched = executor.get_class
    register()
    assert executor.get_class is patched, "loaded once more, it patches nothing"
    options = dict(enable_lora=True, additional_config={"pat": {"unknown": 1}})
    config = engine_config(backend, **options)
    monkeypatch.setattr(executor, "get_class", staticmethod(patched.__wrapped__))
    stock = engine_config(backend, **options)
    assert str(config) == str(stock)
    assert config.compute_hash() == stock.compute_hash()
    assert config.parallel_config.worker_cls == stock.parallel_config.worker_cls
    assert config.scheduler_config.scheduler_cls is None


def test_options_that_are_not_read_are_told_of(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an engine's config is made, once; an engine with PAT, and one without options, say
    nothing."""
    from vllm import logger

    logger._print_warning_once.cache_clear()
    # vLLM sets up its own loggers' handlers anew for each config.
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("pat_vllm.plugin"), "handlers", [handler])
    engine_config("pat", additional_config={"pat": {}})
    engine_config("mp")
    for _ in range(2):
        engine_config("mp", additional_config={"pat": {"policy": {"kind": "static"}}})
    (line,) = lines
    assert line.startswith('additional_config["pat"] has no effect')
    assert "distributed_executor_backend='mp'" in line and 'backend="pat"' in line


def test_calls_on_an_engine_without_pat_name_the_option(executor: Any) -> None:
    """Before anything is sent to it."""
    words = "without PAT: distributed_executor_backend='mp'; make it with .*=\"pat\""
    engine: Any = SimpleNamespace(vllm_config=engine_config("mp"))
    llm: Any = SimpleNamespace(llm_engine=engine)
    calls: list[tuple[Any, Any, list[int]]] = [
        (pat_vllm.report, pat_vllm.report_async, []),
        (pat_vllm.switch, pat_vllm.switch_async, [2]),
        (pat_vllm.speculate, pat_vllm.speculate_async, [1]),
    ]
    for call, call_async, arguments in calls:
        with pytest.raises(ValueError, match=words):
            call(llm, *arguments)
        with pytest.raises(ValueError, match=words):
            asyncio.run(call_async(engine, *arguments))


IMPORTS = """
import sys

import pat_vllm.plugin
heavy = {"torch", "vllm", "numpy", "pydantic"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy

import vllm.v1.executor.abstract
before = set(sys.modules)
pat_vllm.plugin.register()
assert set(sys.modules) == before, set(sys.modules) - before

from types import SimpleNamespace
config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="mp"))
vllm.v1.executor.abstract.Executor.get_class(config)
ours = {name for name in sys.modules if name.startswith("pat_vllm")}
parts = {"patches", *("patches." + one for one in ("dead_engine", "front_end", "replacing"))}
parts |= {"plugin"}
assert ours == {"pat_vllm", *("pat_vllm." + part for part in parts)}, ours
print("light")
"""


def test_plugin_imports_nothing_that_vllm_has_not() -> None:
    """Neither its module nor loading it nor a stock engine imports the rest of PAT."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("light\n")


# ---------------------------------------------------------------- asked for


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_ways_to_ask_are_alike(way: str, executor: Any) -> None:
    config = engine_config(way)
    for _ in range(2):  # vLLM asks several times: nothing changes
        assert config.parallel_config.worker_cls == WORKER
        assert config.scheduler_config.scheduler_cls == SCHEDULER
        assert config.parallel_config.use_ray is False
        assert config.parallel_config.world_size == 2
        assert issubclass(executor.get_class(config), pat_vllm.PATExecutor)
    config.additional_config = {"pat": {"no": 1}}
    with pytest.raises(ValueError, match="unknown option 'no'"):
        executor.get_class(config)


def test_core_and_replicas_hash_blocks_alike(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 has hashes cover tokens that a drafter with weights reads behind a block, but not
    where a connector is configured: it would in the core, and not in replicas. Older ones have
    neither that nor the option."""
    from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig

    monkeypatch.setattr(SpeculativeConfig, "use_eagle_block_drop", lambda self: True)
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", 1, raising=False)
    monkeypatch.setattr(SpeculativeConfig, "disable_lookahead_block_hashes", False, raising=False)

    def lookahead(config: Any, connector: str | None = None) -> int:
        config.kv_transfer_config = connector and KVTransferConfig(
            kv_connector=connector, kv_role="kv_both"
        )
        return getattr(config, "num_hash_lookahead_tokens", 0)

    options = {"speculative_config": ngram_config(2)}
    is_newer = hasattr(VllmConfig, "num_hash_lookahead_tokens")
    assert lookahead(engine_config("mp", **options)) == is_newer
    config = engine_config("pat", **options)
    assert config.speculative_config.disable_lookahead_block_hashes
    assert lookahead(config) == lookahead(config, "PATConnector")


@pytest.mark.parametrize("backend", ["mp", "pat", None])
def test_an_option_asks_where_somebody_else_names_the_backend(backend: str | None) -> None:
    """The engine is the one that the word asks for, and so is its config's hash."""
    register()
    word = engine_config("pat", additional_config={"pat": {"enabled": True, "layouts": [1, 2]}})
    option = engine_config(backend, additional_config={"pat": {"enabled": True, "layouts": [1, 2]}})
    assert str(option) == str(word)
    assert option.compute_hash() == word.compute_hash()
    assert option.scheduler_config.scheduler_cls == SCHEDULER
    assert option.parallel_config.worker_cls == WORKER


def test_an_option_asks_for_rays_workers_where_a_trainer_names_ray() -> None:
    register()
    with pytest.raises(ValueError, match=r"pat.launcher='ray' runs on CUDA and ROCm"):
        engine_config("ray", additional_config={"pat": {"enabled": True}})
    named = {"enabled": True, "launcher": "mp"}
    config = engine_config("ray", additional_config={"pat": named})
    assert config.additional_config["pat"]["launcher"] == "mp"
    assert config.scheduler_config.scheduler_cls == SCHEDULER


@pytest.mark.parametrize("backend", ["pat", "class"])
def test_an_option_switches_off_where_the_word_stands(backend: str) -> None:
    """What vLLM would do; other options are not read."""
    register()
    stock = engine_config(None)
    config = engine_config(backend, additional_config={"pat": {"enabled": False, "unknown": 1}})
    config.additional_config, stock.instance_id = {}, config.instance_id
    assert str(config) == str(stock)
    assert config.parallel_config.distributed_executor_backend == "mp"


def test_what_an_option_cannot_stand_in_for_is_refused() -> None:
    register()
    for options, backend, words in (
        ({"enabled": True}, "external_launcher", "cannot stand in for; allowed: mp, ray, uni"),
        ({"enabled": True}, "external_launcher", "colocated TRL.*use the trainer's server mode"),
        ({"enabled": "yes"}, "mp", "option 'enabled' has value 'yes'"),
    ):
        with pytest.raises(ValueError, match=words):
            engine_config(backend, additional_config={"pat": options})


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        *((version, True) for version in ("0.31.0", "0.32.1+cpu", "0.33.0.dev7")),
        *((version, False) for version in ("0.9.2", "0.30.0", "0.34.0rc1", "1.32.0", "dev")),
    ],
)
def test_versions(version: str, tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is installed, what is tested, and the override, which works."""
    import vllm.version

    monkeypatch.setattr(vllm.version, "__version__", version)
    monkeypatch.setenv(ALLOW_UNTESTED, "0")
    if tested:
        check_vllm_version()
    else:
        with pytest.raises(ValueError, match=rf"vLLM {version} is installed.*{ALLOW_UNTESTED}=1"):
            check_vllm_version()
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    check_vllm_version()


def test_an_engine_on_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where PAT is asked for."""
    import vllm.version

    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    monkeypatch.setattr(vllm.version, "__version__", "0.99.0")
    for way in ("pat", "class"):
        with pytest.raises(ValueError, match=r"vLLM 0\.99\.0 is installed"):
            engine_config(way)
    assert engine_config("mp").scheduler_config.scheduler_cls is None
