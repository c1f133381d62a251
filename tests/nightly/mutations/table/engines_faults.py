# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes around processes that end, switches that are not made, pauses, and the policy's part."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/engine/test_vision.py::test_a_switch_carries_the_positions_of_tokens": [
        ("a switch loses the positions of tokens", "worker.request_state:V1RequestStateTransfer.take", "not in self._NEW", "not in {*self._NEW, 'mrope_positions'}"),
    ],
    "tests/engine/test_vision.py::test_an_image_is_refused_and_nothing_is_lost": [
        ("a refused image is not explained", "patches.front_end:explain_refused_media", "if not model.is_multimodal_model or", "if model.is_multimodal_model or"),
    ],
    "tests/engine/test_faults.py::test_an_orphan_ends + tests/engine/test_faults.py::test_a_killed_front_end_takes_its_engine_along": [
        ("an engine core does not watch its front end", "executor.parent_watchdog:end_when_orphaned", "_when_parent_is_gone(_ENGINE_CORE, end)", "_when_parent_is_gone(_WORKER, end)"),
    ],
    "tests/engine/test_faults.py::test_an_orphan_ends": [
        ("an orphaned engine core waits for its shutdown without end", "executor.parent_watchdog:end_when_orphaned", "threading.Timer(_SHUTDOWN_SECONDS, _exit_with_children).start()", "pass"),
        ("a stopped worker outlives an orphaned engine core", "executor.parent_watchdog:_exit_with_children", "child.kill()", "pass"),
        ("a worker does not watch its engine core", "executor.parent_watchdog:exit_when_orphaned", "_when_parent_is_gone(_WORKER, end)", "_when_parent_is_gone(_ENGINE_CORE, end)"),
    ],
    "tests/engine/test_faults.py::test_a_killed_worker_is_reported_to_all": [
        ("queues of killed workers stay in shared memory", "executor.os_resources:OsResourceCleanup.remove", "_remove_queue(queue)", "remove_sockets(queue)"),
    ],
    "tests/vllm/patches/test_dead_engine.py::test_a_core_that_ends_is_not_killed": [
        ("an engine core is killed while it ends", "patches.dead_engine:end_in_order", "signal.SIG_IGN if action is signal.SIG_DFL else action", "action"),
    ],
    "tests/vllm/patches/test_dead_engine.py::test_a_signal_may_come_while_a_core_handles_another": [
        ("an engine core hangs in a signal's handler", "patches.dead_engine:let_signals_meet", "vars(callback)[_TRIGGERED] = True", "pass"),
    ],
    "tests/vllm/executor/test_lanes.py::test_what_killed_workers_leave_is_removed": [
        ("the file where killed workers have met stays", "executor.os_resources:OsResourceCleanup.add", 'self._rendezvous.add(Path(resources.met_at.removeprefix("file://")))', "pass"),
    ],
    "tests/engine/test_faults.py::test_requests_that_find_no_room_are_recomputed": [
        ("the report counts what was planned to be recomputed", "scheduler.switch:_report", "sum(1 for c in plan.carried if c.computed) - migrated", "sum(1 for c in plan.carried if c.computed and not c.migrates)"),
    ],
    "tests/engine/test_async.py::test_streams_across_switches": [
        ("replicas are asked to sample again", "executor.executor:PATExecutorMixin.sample_tokens", "self._unsampled.clear()", "pass"),
    ],
    "tests/engine/test_async.py::test_pause_keeping_requests": [
        ("a paused engine goes on after a switch", "scheduler.replica_set:ReplicaSet.replace", "self.set_pause_state(self.pause_state)", "pass"),
    ],
    "tests/engine/test_async.py::test_drafts_on_demand": [
        ("the asynchronous call for drafts asks for a layout", "api:speculate_async", "SPECULATE_COMMAND", "SWITCH_COMMAND"),
    ],
    "tests/engine/test_policy.py::test_it_profiles_plans_and_reports + tests/vllm/scheduler/test_scheduler.py": [
        ("a layout that a user asked for holds for ever", "scheduler.layout_controller:LayoutController.end_batch_if_over", "self._forced = False", "pass"),
        ("the policy waits when its back-off is over", "scheduler.layout_controller:LayoutController._follow_policy", "now < self._back_off_until", "now > self._back_off_until"),
    ],
    "tests/engine/test_policy.py + tests/vllm/scheduler/test_scheduler.py": [
        ("the policy does not hear of switches", "scheduler.monitor:Monitor.switched", "self.policy.switched(report)", "pass"),
    ],
    "tests/engine/test_policy.py::test_fixed_lengths_are_known_and_not_learnt_from": [
        ("fixed lengths are learnt from", "scheduler.monitor:Monitor.ended", "if not tracked.exact", "if True"),
    ],
    "tests/engine/test_ray.py::test_the_launcher_is_chosen_by_the_placement_group": [
        ("a placement group chooses no launcher", "executor.launcher:executor_class", '"ray" if _in_placement_group(vllm_config.parallel_config) else "mp"', '"mp"'),
    ],
    "tests/engine/test_ray.py::test_single_layouts_agree_and_differ_by_request": [
        ("a Ray engine keeps its placement group", "executor.ray:PATRayExecutor.shutdown", "remove_placement_group(group)", "pass"),
    ],
    "tests/engine/test_ray.py::test_ranks_on_several_nodes_are_refused": [
        ("bundles that are asked for are not looked at", "executor.ray:place_ranks", "_parse_indices(wanted) if wanted else None", "None"),
    ],
})
# fmt: on
