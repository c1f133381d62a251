"""Environment for vLLM's CPU build, which has to be set before anything imports vLLM; limits."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run, so that a red one is of the change; other ones on request.
# No deadlines: the machine may be busy.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
# To find that a test fails is enough: no smaller example is looked for.
hypothesis.settings.register_profile(
    "first failure",
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    derandomize=True,
    deadline=None,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_ENVIRONMENT = {
    # Tests run engines with more ranks than cores; one with two ranks may ask for "0|1".
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Or the n-gram drafter of a stock engine gives OpenMP as many threads as there are cores.
    "NUMBA_NUM_THREADS": "1",
    # Threads of a tiny model only spin while they wait for each other: with two per rank, four
    # ranks on two cores generate 25 times slower.
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # pytest's process has threads by the time an engine starts its workers.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Without it a tp>1 engine compiles C++ at its first step: seconds per batch-size class.
    "TORCHDYNAMO_DISABLE": "1",
    # Models are built here (tests/support/models.py): nothing is downloaded, nobody is told.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# Of torchvision, processes find what needs none of its operators (tests/support/torchvision_ops).
_ROOT = Path(__file__).parents[1]
_PACKAGES = _ROOT / ".venv" / "torchvision"
if _PACKAGES.is_dir():
    _torchvision = [str(_ROOT / "tests/support/torchvision_ops"), str(_PACKAGES)]
    sys.path[:0] = _torchvision
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*_torchvision, os.environ.get("PYTHONPATH")])
    )
# It would override an engine's own `kv_cache_memory_bytes`.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

CEILINGS = {"unit": 120, "vllm": 300, "nightly": 3600}
"""Seconds for a test, its fixtures included, by tier: against those that hang, and far above what
honest work takes on a slow and busy machine."""
CEILING = 900


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(CEILINGS.get(path.parts[0], CEILING)))
        # What shares an engine, or a module's fixtures, runs in one process (--dist loadgroup).
        shared = item.get_closest_marker("engine") is not None
        group = item.callspec.params["spec"] if shared else path  # type: ignore[attr-defined]
        item.add_marker(pytest.mark.xdist_group(str(group)))


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> Iterator[None]:
    """What lives on is not looked at again: vLLM collects garbage when it loads a model, and with
    all that it imports each time takes a second."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def environment_is_read() -> Iterator[None]:
    """vLLM reads its variables when it is asked, also after an engine that ran in this process,
    which has it keep them as they were."""
    if (envs := sys.modules.get("vllm.envs")) is not None:
        envs.disable_envs_cache()
    yield
    if envs is not None:
        kept = vars(envs).keys() & envs.environment_variables
        assert not kept, f"set as attributes, which monkeypatch leaves in place: {kept}"


# Or libraries that check for it at exit report leaks.
atexit.register(gc.unfreeze)
