"""Mistakes around processes that end, switches that are not made, pauses, and the policy's part."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

FAULTS = "tests/engine/test_faults.py"
ASYNC = "tests/engine/test_async.py"
POLICY = "tests/engine/test_policy.py"
RAY = "tests/engine/test_ray.py"
SCHEDULER = "tests/vllm/scheduler/test_scheduler.py"

VISION = "tests/engine/test_vision.py"

MUTATIONS = [
    Mutation(
        "a switch loses the positions of tokens",
        "pat_vllm.worker.handover:V1Handover.take",
        {"not in self._NEW": "not in {*self._NEW, 'mrope_positions'}"},
        (f"{VISION}::test_a_switch_carries_the_positions_of_tokens",),
    ),
    Mutation(
        "a refused image is not explained",
        "pat_vllm.patches.front_end:explain_refused_media",
        {"if not model.is_multimodal_model or": "if model.is_multimodal_model or"},
        (f"{VISION}::test_an_image_is_refused_and_nothing_is_lost",),
    ),
    Mutation(
        "an engine core does not watch its front end",
        "pat_vllm.executor.orphan:end_when_orphaned",
        {"startswith(_ENGINE_CORE)": "startswith(_WORKER)"},
        (
            f"{FAULTS}::test_an_orphan_ends",
            f"{FAULTS}::test_a_killed_front_end_takes_its_engine_along",
        ),
    ),
    Mutation(
        "an orphaned engine core waits for its shutdown without end",
        "pat_vllm.executor.orphan:end_when_orphaned",
        {"threading.Timer(_SHUTDOWN_SECONDS, _exit_with_children).start()": "pass"},
        (f"{FAULTS}::test_an_orphan_ends",),
    ),
    Mutation(
        "a stopped worker outlives an orphaned engine core",
        "pat_vllm.executor.orphan:_exit_with_children",
        {"child.kill()": "pass"},
        (f"{FAULTS}::test_an_orphan_ends",),
    ),
    Mutation(
        "a worker does not watch its engine core",
        "pat_vllm.executor.orphan:exit_when_orphaned",
        {"startswith(_WORKER)": "startswith(_ENGINE_CORE)"},
        (f"{FAULTS}::test_an_orphan_ends",),
    ),
    Mutation(
        "queues of killed workers stay in shared memory",
        "pat_vllm.executor.leftovers:Leftovers.remove",
        {"_remove_queue(queue)": "remove_sockets(queue)"},
        (f"{FAULTS}::test_a_killed_worker_is_reported_to_all",),
    ),
    Mutation(
        "the file where killed workers have met stays",
        "pat_vllm.executor.leftovers:Leftovers.add",
        {'self._rendezvous.add(Path(made.met_at.removeprefix("file://")))': "pass"},
        ("tests/vllm/executor/test_lanes.py::test_what_killed_workers_leave_is_removed",),
    ),
    Mutation(
        "the report counts what was planned to be recomputed",
        "pat_vllm.scheduler.switch:_report",
        {
            "sum(1 for c in plan.carried if c.computed) - migrated": (
                "sum(1 for c in plan.carried if c.computed and not c.migrates)"
            )
        },
        (f"{FAULTS}::test_requests_that_find_no_room_are_recomputed",),
    ),
    Mutation(
        "replicas are asked to sample again",
        "pat_vllm.executor.executor:PATExecutorMixin.sample_tokens",
        {"self._unsampled.clear()": "pass"},
        (f"{ASYNC}::test_streams_across_switches",),
    ),
    Mutation(
        "a paused engine goes on after a switch",
        "pat_vllm.scheduler.replica_set:ReplicaSet.replace",
        {"self.set_pause_state(self.pause_state)": "pass"},
        (f"{ASYNC}::test_pause_keeping_requests",),
    ),
    Mutation(
        "the policy switches a paused engine",
        "pat_vllm.scheduler.layout_controller:LayoutController._follow_policy",
        {" or active.pause_state != PauseState.UNPAUSED": ""},
        (f"{POLICY}::test_a_paused_engine_keeps_its_layout",),
    ),
    Mutation(
        "the asynchronous call for drafts asks for a layout",
        "pat_vllm.api:speculate_async",
        {"SPECULATE_COMMAND": "SWITCH_COMMAND"},
        (f"{ASYNC}::test_drafts_on_demand",),
    ),
    Mutation(
        "a layout that a user asked for holds for ever",
        "pat_vllm.scheduler.layout_controller:LayoutController.end_batch_if_over",
        {"self._forced = False": "pass"},
        (f"{POLICY}::test_it_profiles_plans_and_reports", SCHEDULER),
    ),
    Mutation(
        "the policy waits when its back-off is over",
        "pat_vllm.scheduler.layout_controller:LayoutController._follow_policy",
        {"now < self._back_off_until": "now > self._back_off_until"},
        (f"{POLICY}::test_it_profiles_plans_and_reports", SCHEDULER),
    ),
    Mutation(
        "the policy does not hear of switches",
        "pat_vllm.scheduler.monitor:Monitor.switched",
        {"self.policy.switched(report)": "pass"},
        (POLICY, SCHEDULER),
    ),
    Mutation(
        "fixed lengths are learnt from",
        "pat_vllm.scheduler.monitor:Monitor.ended",
        {"if not tracked.exact": "if True"},
        (f"{POLICY}::test_fixed_lengths_are_known_and_not_learnt_from",),
    ),
    Mutation(
        "a batch's saving is told twice",
        "pat_vllm.scheduler.monitor:Monitor.idle",
        {"self._saved_since = math.nextafter(batch.at, math.inf)": "pass"},
        (f"{POLICY}::test_the_metrics_say_what_was_saved",),
    ),
    Mutation(
        "a placement group chooses no launcher",
        "pat_vllm.executor.launcher:executor_class",
        {'"ray" if _in_placement_group(vllm_config.parallel_config) else "mp"': '"mp"'},
        (f"{RAY}::test_the_launcher_is_chosen_by_the_placement_group",),
    ),
    Mutation(
        "a Ray engine keeps its placement group",
        "pat_vllm.executor.ray:PATRayExecutor.shutdown",
        {"remove_placement_group(group)": "pass"},
        (f"{RAY}::test_single_layouts_agree_and_differ_by_request",),
    ),
    Mutation(
        "bundles that are asked for are not looked at",
        "pat_vllm.executor.ray:place_ranks",
        {"_parse_indices(wanted) if wanted else None": "None"},
        (f"{RAY}::test_ranks_on_several_nodes_are_refused",),
    ),
]
