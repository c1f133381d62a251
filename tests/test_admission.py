"""Admission at a switch gives what vLLM's own gives, in less time."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.without_workers import EXECUTOR, answer, engine_config, request
from pat_vllm.executor.executor import StepResult
from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.scheduler import switch as switch_module
from pat_vllm.scheduler.scheduler import PATScheduler

LAYOUTS = (1, 8, 2, 4, 1)


Admitted = list[set[str]]
"""Loads that vLLM counts as in flight, by replica."""


def carried(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> tuple[list[SwitchCommand], list[Admitted]]:
    """The commands of some switches between which requests run, with pools that are too small."""
    config, stock = engine_config(8, num_blocks=80)
    scheduler: Any = PATScheduler(vllm_config=config, **stock)
    scheduler.controller.costs.mode = "migrate"
    commands: list[SwitchCommand] = []
    admitted: list[Admitted] = []
    make_switch = EXECUTOR.switch

    def switch(command: SwitchCommand) -> list[Any]:
        commands.append(command)
        return make_switch(command)

    monkeypatch.setattr(EXECUTOR, "switch", switch)
    rng = random.Random(seed)
    for index in range(40):
        scheduler.add_request(request(f"r{index}", index, 2 * rng.randint(8, 300)))
    for tp in LAYOUTS:
        for _ in range(3):
            output = scheduler.schedule()
            results = [StepResult(i, answer(one), 0.01) for i, one in output.steps.items()]
            scheduler.update_from_output(output, results)
        scheduler.controller.request(tp)
        admitted.append(
            [
                {one.request_id for one in replica.scheduler._inflight_prefills}
                for replica in scheduler.replica_set.replicas
            ]
        )
        scheduler.replica_set.discard_retired()
    monkeypatch.undo()
    switches = scheduler.controller.report().switches
    assert any(0 < one.migrated < one.migrated + one.recomputed for one in switches), "no pool full"
    return commands, admitted


@pytest.mark.parametrize("seed", range(5))
def test_what_vllm_admits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    found = carried(monkeypatch, seed)
    monkeypatch.setattr(switch_module, "linear_time_admission", lambda scheduler: nullcontext())
    expected = carried(monkeypatch, seed)
    assert len(found[0]) == len(LAYOUTS)
    assert found == expected
