"""Our code fits each vLLM that we support: its types, and what it does that no type says.

vLLM's source is read, never imported, so this also covers versions and builds that cannot be
installed here. mypy finds our uses by itself, wherever our code says of which class of vLLM's an
object is; where it cannot, `spelled.py` and `behaviour.py` list them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.gpu.bare.one_gpu import ENVIRONMENT
from pat_vllm.plugin import TESTED_VLLM
from tests.vllm.contract.behaviour import check_patches, check_texts
from tests.vllm.contract.checker import CACHE, FOLDERS, Found, check
from tests.vllm.contract.wheels import Unavailable, vllm_sources

INSTALLED = "installed"
PUBLISHED = ("0.31.0", "0.32.0", "0.33.0")


def number(version: str) -> str:
    if version != INSTALLED:
        return version
    return importlib.metadata.version(importlib.metadata.packages_distributions()["vllm"][0])


SUPPORTED = (INSTALLED, *(version for version in PUBLISHED if version != number(INSTALLED)))

NOT_OVERRIDDEN = {
    ("0.31.0", "has_request"): "new in 0.33",
    ("0.31.0", "get_external_weight_memory"): "new in 0.32, whose GPU worker asks for it",
    ("0.31.0", "_make_model_runner"): "`compat.MakesModelRunner` calls it",
    ("0.32.0", "has_request"): "new in 0.33; 0.32 does not ask `PATScheduler.has_request`",
}
"""Methods of ours that replace one of vLLM's in other versions than this one."""

OTHERWISE = {
    ("0.31.0", "Worker._make_model_runner"): "`compat.MakesModelRunner` has it",
    ("0.31.0", "GPUModelRunner.sample_tokens"): "V2 has no n-gram drafter: V1 runs, which masks",
    ("0.31.0", "CuMemAllocator.use_memory_pool"): "`compat.use_memory_pool` trims and keeps",
    ("0.31.0", "TargetDependentARSpeculator.propose"): "drafters with weights are refused",
    ("0.31.0", "MambaMixer2.get_kv_cache_spec"): "it keeps no state from within a step",
}
"""What a version does not do, and what answers for it."""

pytestmark = pytest.mark.timeout(1200)


@cache
def sources(version: str) -> Path:
    """The folder that holds a vLLM.

    Raises:
        Unavailable: it is neither cached nor to be had.
    """
    if version != INSTALLED:
        return vllm_sources(version)
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    # mypy wants nothing of site-packages on its path.
    link = CACHE / "sources" / "vllm"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(spec.origin).parent)
    return link.parent


@cache
def found(version: str) -> Found:
    return check(sources(version), CACHE / version)


def available(version: str) -> str:
    """The version, whose test is skipped if its source is not to be had."""
    try:
        sources(version)
    except Unavailable as why:
        pytest.skip(f"vLLM {version} was NOT checked: {why}")
    return version


@pytest.fixture(params=SUPPORTED)
def version(request: pytest.FixtureRequest) -> str:
    return available(request.param)


def test_our_code_has_the_types_of_vllm(version: str) -> None:
    problems = found(version).problems
    assert not problems, f"vLLM {version} does not have what PAT uses:\n" + "\n".join(problems)


def test_vllm_does_what_we_rely_on(version: str) -> None:
    problems = list(check_texts(sources(version)))
    known = [name for of, name in OTHERWISE if number(version).startswith(of)]
    left = [problem for problem in problems if not any(f".{name} " in problem for name in known)]
    assert not left, f"vLLM {version} does something else:\n" + "\n".join(left)
    assert len(problems) == len(known), "what vLLM does again needs no answer"


def test_ranks_can_share_a_gpu(version: str) -> None:
    """What `benchmarks.gpu.bare.one_gpu` replaces and sets is there."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    roots = (sources(version), FOLDERS[0], Path(torch.origin).parents[1])
    problems = [problem for root in roots for problem in check_patches(root)]
    known = (sources(version) / "vllm" / "envs.py").read_text()
    problems += [name for name in ENVIRONMENT if f'"{name}": ' not in known]
    assert not problems, f"vLLM {version} has other things:\n" + "\n".join(problems)


def test_what_we_override_is_called_so(version: str) -> None:
    """A method that replaces one of vLLM's in another version would not be called in this one."""
    anywhere: frozenset[str] = frozenset()
    for other in SUPPORTED:
        try:
            anywhere |= found(other).overrides
        except Unavailable:
            continue
    gone = {line.rpartition(" ")[2]: line for line in anywhere - found(version).overrides}
    known = {name for of, name in NOT_OVERRIDDEN if number(version).startswith(of)}
    assert gone.keys() == known, f"vLLM {version} has none of {list(gone.values())}"


def test_every_tested_version_is_read() -> None:
    first, past = (tuple(map(int, version.split("."))) for version in TESTED_VLLM)
    supported = {(first[0], minor) for minor in range(first[1], past[1])}
    assert {tuple(map(int, v.split(".")[:2])) for v in PUBLISHED} == supported


def test_what_is_listed_is_used() -> None:
    """`spelled.py` has no name that our code does not have any more."""
    ours = "\n".join(f.read_text() for folder in FOLDERS for f in folder.glob("pat_*/**/*.py"))
    used = set(re.findall(r"\w+", ours))
    listed = ast.parse(Path(__file__).with_name("spelled.py").read_text())
    names = {n.attr for n in ast.walk(listed) if isinstance(n, ast.Attribute)}
    names |= {k.arg for k in ast.walk(listed) if isinstance(k, ast.keyword) and k.arg}
    assert names <= used
