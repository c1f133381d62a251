"""Engines that tests share: one at a time, clean whenever a test gets it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pat_vllm
from tests.support.engines import engine, scheduler_of
from tests.support.v2_on_cpu.v2_on_cpu import model_runner_v2, scheduled_asynchronously

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class EngineSpec:
    """What a shared engine is made of.

    Attributes:
        name: in the ids of tests.
        model: a name in `tests.support.models.SPECS`.
        pat: PAT's options.
        options: vLLM's, beside those of `tests.support.engines.OPTIONS`.
        model_runner_v2: with Model Runner V2 and asynchronous scheduling, CUDA's defaults.
        without_async_scheduling: V2 alone.
    """

    name: str
    model: str
    ranks: int
    pat: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model_runner_v2: bool = False
    without_async_scheduling: bool = False

    def __str__(self) -> str:
        return self.name


class EnginePool:
    """Hands out the engine of a spec, and keeps it until another spec is asked for."""

    def __init__(self) -> None:
        self._spec: EngineSpec | None = None
        self._llm: Any = None
        self._engine = contextlib.ExitStack()
        self._kept: dict[str, Any] = {}

    def get(self, spec: EngineSpec) -> Any:
        """The `LLM` of this spec. An engine of another spec ends first."""
        if spec is not self._spec:
            self.close()
            self._llm = self._start(spec)
            self._spec = spec
        return self._llm

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """A value made with the current engine, by the first test that asks for it."""
        assert self._spec is not None, "there is no engine yet: ask for the fixture `llm`"
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def close(self) -> None:
        """End the current engine, if there is one."""
        self._spec = self._llm = None
        self._kept.clear()
        engine, self._engine = self._engine, contextlib.ExitStack()
        engine.close()

    def _start(self, spec: EngineSpec) -> Any:
        if spec.model_runner_v2:
            self._engine.enter_context(model_runner_v2())
        with contextlib.ExitStack() as start:
            if spec.model_runner_v2 and not spec.without_async_scheduling:
                start.enter_context(scheduled_asynchronously())
            return self._engine.enter_context(
                engine(spec.model, spec.ranks, spec.pat, **spec.options)
            )


def go_home(llm: Any) -> None:
    """End requests; go to the default layout and draft length; drop cached prefixes."""
    front = llm.llm_engine
    if left := list(front.output_processor.request_states):
        front.abort_request(left, internal=True)
    scheduler_of(llm).replica_set.drain()
    if llm.llm_engine.vllm_config.speculative_config is not None:
        pat_vllm.speculate(llm, None)
    assert pat_vllm.switch(llm, tp=pat_vllm.report(llm).layouts[0].tp)
    assert llm.reset_prefix_cache()


def assert_clean(llm: Any) -> None:
    """The engine has no request and no KV, and is in its default layout."""
    assert not llm.llm_engine.has_unfinished_requests()
    scheduler = scheduler_of(llm)
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.get_kv_cache_usage() == 0
    report = pat_vllm.report(llm)
    assert report.layout == report.layouts[0]
