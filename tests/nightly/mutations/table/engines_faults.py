# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes around processes that end, switches that are not made, pauses, and the policy's part."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/engine/test_faults.py::test_an_orphan_ends + tests/engine/test_faults.py::test_a_killed_front_end_takes_its_engine_along": [
        ("an engine core does not watch its front end", "executor.parent_watchdog:end_when_orphaned", "_when_parent_is_gone(_ENGINE_CORE, end)", "_when_parent_is_gone(_WORKER, end)"),
    ],
    "tests/engine/test_faults.py::test_an_orphan_ends": [
        ("a stopped worker outlives an orphaned engine core", "executor.parent_watchdog:_exit_with_children", "child.kill()", "pass"),
    ],
})
# fmt: on
