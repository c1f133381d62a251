"""Every name and signature of vLLM's that we rely on is there, in each version that we support.

vLLM's source is read, never imported, so this also covers versions and builds that cannot be
installed here. What "rely on" means is in `own.py` (found in our source), `names.py` and
`behaviour.py` (listed).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from pat_vllm.plugin import TESTED_VLLM
from tests.contract.behaviour import REPLACED, TEXTS
from tests.contract.listed import (
    check_listed,
    check_listed_calls,
    check_replaced,
    check_text,
    stale,
    unlisted,
)
from tests.contract.names import NAMES
from tests.contract.own import (
    Checked,
    check_calls,
    check_names,
    check_subclass,
    our_modules,
    subclasses,
)
from tests.contract.source import Package
from tests.contract.wheels import Unavailable, vllm_sources

INSTALLED = "installed"
PUBLISHED = ("0.32.0", "0.33.0")

KNOWN_DIFFERENCES = {
    ("0.32.0", "vllm.v1.core.sched.interface.SchedulerInterface.has_request"): (
        "new in 0.33; 0.32 does not ask `PATScheduler.has_request` (scheduler/scheduler.py)"
    ),
}
"""What is not alike in the versions, by version and name, and where our code copes with it."""

FILES = our_modules()
BY_NAME = {file.module.name: file for file in FILES}
SUBCLASSES = subclasses(FILES)


@cache
def package(version: str) -> Package:
    """A vLLM, by version.

    Raises:
        Unavailable: it is neither cached nor to be had.
    """
    if version != INSTALLED:
        return Package("vllm", f"vLLM {version}", (vllm_sources(version),))
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    distributions = importlib.metadata.packages_distributions()["vllm"]
    label = f"{distributions[0]} {importlib.metadata.version(distributions[0])}"
    return Package("vllm", label, (Path(spec.origin).parents[1],))


@cache
def overrides() -> list[set[str]]:
    """For each of our subclasses, what it overrides in any version that can be had."""
    found: list[set[str]] = [set() for _ in SUBCLASSES]
    for version in (INSTALLED, *PUBLISHED):
        try:
            vllm = package(version)
        except Unavailable:
            continue
        for names, sub in zip(found, SUBCLASSES, strict=True):
            names |= sub.overrides(vllm)
    return found


@pytest.fixture(params=[INSTALLED, *PUBLISHED])
def vllm(request: pytest.FixtureRequest) -> Package:
    try:
        return package(request.param)
    except Unavailable as why:
        pytest.skip(f"vLLM {request.param} was NOT checked: {why}")


def everything(vllm: Package) -> list[Checked]:
    """Everything that we rely on, checked."""
    found: list[Checked] = []
    for file in FILES:
        found += check_names(file, vllm)
        found += check_calls(file, vllm)
    for sub, names in zip(SUBCLASSES, overrides(), strict=True):
        found += check_subclass(sub, vllm, names)
    for row in NAMES:
        found += check_listed(row, BY_NAME, vllm)
    found += check_listed_calls(NAMES, BY_NAME, vllm)
    found += [check_text(text, BY_NAME, vllm) for text in TEXTS]
    for replaced in REPLACED:
        found += check_replaced(replaced, SUBCLASSES, vllm)
    return found


def known(one: Checked, vllm: Package) -> bool:
    return any(
        vllm.label.endswith(version) and one.name == name for version, name in KNOWN_DIFFERENCES
    )


def problems(checked: Iterable[Checked], vllm: Package) -> list[str]:
    """Lines: who of us, what of vLLM's, what is wrong with it."""
    broken = (one for one in checked if one.problem and not known(one, vllm))
    return list(dict.fromkeys(f"{one.where}: {one.name} {one.problem}" for one in broken))


# -------------------------------------------------------------------- the contract


def test_what_we_rely_on_is_there(vllm: Package) -> None:
    found = problems(everything(vllm), vllm)
    assert not found, f"{vllm.label} does not have what PAT uses:\n" + "\n".join(found)


def test_every_tested_version_is_read() -> None:
    first, past = (tuple(map(int, version.split("."))) for version in TESTED_VLLM)
    supported = {(first[0], minor) for minor in range(first[1], past[1])}
    assert {tuple(map(int, v.split(".")[:2])) for v in PUBLISHED} == supported


def test_known_differences_are_still_there() -> None:
    try:
        versions = {version: package(version) for version in PUBLISHED}
    except Unavailable as why:
        pytest.skip(f"the known differences were NOT checked: {why}")
    for (version, name), where in KNOWN_DIFFERENCES.items():
        found = everything(versions[version])
        assert any(one.name == name and one.problem for one in found), (
            f"vLLM {version}, {name}: no difference any more ({where})"
        )


# -------------------------------------------------------------------- the list


def test_no_listed_name_is_unused() -> None:
    assert [line for row in NAMES for line in stale(row, BY_NAME)] == []


def test_no_used_name_is_unlisted() -> None:
    found = list(unlisted(BY_NAME, [*NAMES, *TEXTS], package(INSTALLED)))
    assert found == [], "add what is vLLM's to names.py, what is not to NOT_VLLMS there"


def test_found_in_our_source() -> None:
    """What must be among the checked, if the search itself works."""
    names = {one.name for one in everything(package(INSTALLED))}
    assert names >= {
        "vllm.distributed.parallel_state._TP",
        "vllm.distributed.parallel_state._ETP",
        "vllm.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "vllm.v1.request.RequestStatus.WAITING_FOR_REMOTE_KVS",
        "vllm.platforms.interface.Platform.ray_device_key",
        "vllm.v1.worker.gpu_worker.Worker",
        "vllm.v1.worker.gpu_worker.Worker._make_model_runner",
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor.rpc_broadcast_mq",
        "vllm.v1.executor.ray_executor_v2.RayExecutorV2._init_executor",
        "vllm.v1.core.sched.scheduler.Scheduler.schedule(...)",
        "vllm.v1.engine.core.EngineCore: self.scheduler.update_from_output",
        "parallel_state.init_model_parallel_group(...)",
        "NewRequestData(...)",
        "KVTransferConfig(...)",
    }
