"""Mistakes around processes that end, switches that are not made, pauses, and the policy's part."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

FAULTS = "tests/engine/test_faults.py"
ASYNC = "tests/engine/test_async_serve.py"
POLICY = "tests/engine/test_policy.py"
RAY = "tests/engine/test_ray.py"
SCHEDULER = "tests/vllm/scheduler/test_scheduler.py"

MUTATIONS = [
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
        {"threading.Timer(_SHUTDOWN_SECONDS, os._exit, [1]).start()": "pass"},
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
        (f"{FAULTS}::test_a_dead_worker_fails_the_engine_and_leaves_nothing",),
    ),
    Mutation(
        "shared memory named after the rendezvous stays",
        "pat_vllm.executor.leftovers:Leftovers.remove",
        {'(path, *_SHARED_MEMORY.glob(f"{path.name}-*"))': "(path,)"},
        (f"{FAULTS}::test_a_dead_worker_fails_the_engine_and_leaves_nothing",),
    ),
    Mutation(
        "a failed plan leaves requests preempted",
        "pat_vllm.scheduler.switch:_Undo.apply",
        {"self.request.status = self.status": "pass"},
        (f"{FAULTS}::test_a_switch_that_cannot_be_planned_is_undone", SCHEDULER),
    ),
    Mutation(
        "a failed plan forgets what is computed",
        "pat_vllm.scheduler.switch:_Undo.apply",
        {"self.request.num_computed_tokens = self.num_computed_tokens": "pass"},
        (f"{FAULTS}::test_a_switch_that_cannot_be_planned_is_undone", SCHEDULER),
    ),
    Mutation(
        "a failed plan keeps its block pools",
        "pat_vllm.scheduler.switch:switch",
        {"active.factory.discard(fresh)": "pass"},
        (SCHEDULER,),
    ),
    Mutation(
        "a streaming-input session is carried",
        "pat_vllm.scheduler.switch:_check",
        {"request.resumable or ": ""},
        (f"{FAULTS}::test_switches_that_are_refused",),
    ),
    Mutation(
        "the report counts what was planned to be recomputed",
        "pat_vllm.scheduler.switch:switch",
        {
            "sum(1 for c in carried if c.computed) - migrated": (
                "sum(1 for c in carried if c.computed and not c.migrates)"
            )
        },
        (f"{FAULTS}::test_requests_that_find_no_room_are_recomputed",),
    ),
    Mutation(
        "weights are derived while the engine sleeps",
        "pat_vllm.executor.executor:PATExecutorMixin.refresh_weights",
        {" and not self.is_sleeping": ""},
        (f"{FAULTS}::test_weights_are_left_alone_while_the_engine_sleeps",),
    ),
    Mutation(
        "a drain ends with the first result",
        "pat_vllm.executor.executor:PATExecutorMixin.finished",
        {"(results and not wait_for_all)": "results"},
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
        (SCHEDULER,),
    ),
    Mutation(
        "the asynchronous call for drafts asks for a layout",
        "pat_vllm.api:speculate_async",
        {"SPECULATE_COMMAND": "SWITCH_COMMAND"},
        (f"{ASYNC}::test_drafts_on_demand",),
    ),
    Mutation(
        "a layout that a user asked for holds for ever",
        "pat_vllm.scheduler.layout_controller:LayoutController.go_home_if_idle",
        {"self._forced = False": "pass"},
        (f"{POLICY}::test_it_profiles_plans_and_reports", SCHEDULER),
    ),
    Mutation(
        "quiet time is negative",
        "pat_vllm.scheduler.layout_controller:LayoutController._follow_policy",
        {"now - self._monitor.last_arrival": "self._monitor.last_arrival - now"},
        (POLICY,),
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
        {"tracked is None or tracked.exact": "tracked is None"},
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
