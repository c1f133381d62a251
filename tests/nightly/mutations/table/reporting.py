"""Mistakes in reports, metrics, profiles and the doctor."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

_HISTORY = ("tests/unit/reporting/test_history.py",)
_PLOT = ("tests/unit/reporting/test_plot.py",)
_REPORT = ("tests/unit/reporting/test_report.py",)
_ROLLOUT = ("tests/unit/reporting/test_rollout.py",)
_UPDATES = ("tests/unit/metrics/test_updates.py",)
_PROMETHEUS = ("tests/vllm/metrics/test_prometheus.py",)
_PROFILE = ("tests/unit/profiling/test_profile.py",)
_PLAN = ("tests/unit/profiling/test_plan.py",)
_STREAM = ("tests/vllm/profiling/test_stream.py",)
_KEY = ("tests/vllm/profiling/test_key.py",)
_COMPARE = ("tests/unit/doctor/test_compare.py",)
_CHILD = ("tests/unit/doctor/test_child.py",)
_STAGES = ("tests/unit/doctor/test_stages.py",)
_ENVIRONMENT = ("tests/unit/doctor/test_environment.py",)

MUTATIONS = [
    # ---------------------------------------------------------------- reporting
    Mutation(
        "drafts of a batch are counted again in the next",
        "pat_vllm.reporting.history:History.idle",
        {"self._counting.clear()": "pass"},
        _HISTORY,
    ),
    Mutation(
        "each step with drafts is a sample of its own",
        "pat_vllm.reporting.history:History.drafts",
        {"self._counting.get(replica)": "None"},
        _HISTORY,
    ),
    Mutation(
        "a report since a time begins after it",
        "pat_vllm.reporting.history:Records.since",
        {"bisect.bisect_left": "bisect.bisect_right"},
        _HISTORY,
    ),
    Mutation(
        "each step after a switch is its first",
        "pat_vllm.reporting.history:History.step",
        {"self._first_step_due = False": "pass"},
        _HISTORY,
    ),
    Mutation(
        "expected refusals are errors",
        "pat_vllm.reporting.history:History.refused",
        {"not refused.expected": "refused.expected"},
        _HISTORY,
    ),
    Mutation(
        "a step counts as much as a sample of many in the mean draft length",
        "pat_vllm.reporting.drafts:_mean",
        {"s.num_speculative_tokens * s.steps for s": "s.num_speculative_tokens for s"},
        _HISTORY,
    ),
    Mutation(
        "the file of a report is overwritten in place",
        "pat_vllm.reporting.values:Report.save",
        {"write_whole(Path(path), ": "Path(path).write_text("},
        _REPORT,
    ),
    Mutation(
        "a report of any format is read",
        "pat_vllm.reporting.values:Report.load",
        {'content["format"] != FORMAT': "False"},
        _REPORT,
    ),
    Mutation(
        "requests seem to go on after a batch",
        "pat_vllm.reporting.plot:plot_report",
        {"live += [(one.at - began, 0) for one in savings]": "pass"},
        _PLOT,
    ),
    Mutation(
        "going home is drawn as a switch",
        "pat_vllm.reporting.plot:plot_report",
        {'and one.reason != "idle"': ""},
        _PLOT,
    ),
    Mutation(
        "a saving is drawn with its sign turned",
        "pat_vllm.reporting.plot:_draw_costs",
        {
            "b.realised.fixed - b.realised.drafting": "b.realised.drafting - b.realised.fixed",
        },
        _PLOT,
    ),
    Mutation(
        "a layout seems to last while there is no request",
        "pat_vllm.reporting.plot:_spans",
        {"seen += ": "_ = "},
        _PLOT,
    ),
    Mutation(
        "each replica seems to have all requests",
        "pat_vllm.reporting.plot:_draw_replicas",
        {"sample.by_replica[replica]": "sample.num_seqs"},
        _PLOT,
    ),
    Mutation(
        "a rollout's line has the switches of the ones before",
        "pat_vllm.reporting.rollout:describe",
        {"if s.at >= started and s.reason": "if s.reason"},
        _ROLLOUT,
    ),
    Mutation(
        "a rollout's line says that drafts saved what layouts saved",
        "pat_vllm.reporting.rollout:_saved",
        {"{realised.saved_by_drafts:.0%}": "{realised.saved_by_layouts:.0%}"},
        _ROLLOUT,
    ),
    # ---------------------------------------------------------------- metrics
    Mutation(
        "replicas that are gone keep their requests",
        "pat_vllm.metrics.updates:Updates.state",
        {"range(len(num_seqs), before)": "range(0)"},
        _UPDATES,
    ),
    Mutation(
        "gauges travel though they have not changed",
        "pat_vllm.metrics.updates:Updates._set",
        {"if self._shown.get(series) != value:": "if True:"},
        _UPDATES,
    ),
    Mutation(
        "updates are taken twice",
        "pat_vllm.metrics.updates:Updates.take",
        {"self._events, self._gauges = [], {}": "pass"},
        _UPDATES,
    ),
    Mutation(
        "a counter may fall",
        "pat_vllm.metrics.updates:Updates.saved",
        {"max(0.0, getattr(times, way))": "getattr(times, way)"},
        _UPDATES,
    ),
    Mutation(
        "a histogram's seconds are counted as switches",
        "pat_vllm.metrics.updates:Updates.switched",
        {"(switch.reason,), switch.seconds": "(switch.reason,), 1"},
        _PROMETHEUS,
    ),
    Mutation(
        "events without outputs are lost",
        "pat_vllm.scheduler.stats:send_metrics",
        {"carrier is None and updates.has_events": "False"},
        _PROMETHEUS,
    ),
    Mutation(
        "series begin with their first event",
        "pat_vllm.metrics.names:known_series",
        {"for reason in REFUSALS:": "for reason in REFUSALS[1:]:"},
        _PROMETHEUS,
    ),
    # ---------------------------------------------------------------- profiling
    Mutation(
        "an edited profile is believed",
        "pat_vllm.profiling.profile:Profile.load",
        {"content = without_digest(content, named)": "del content[DIGEST]"},
        _PROFILE,
    ),
    Mutation(
        "a cached profile of another engine is taken",
        "pat_vllm.profiling.cache:find",
        {"profile.check(key, path)": "pass"},
        _PROFILE,
    ),
    Mutation(
        "thinned times leave out the last",
        "pat_vllm.profiling.profile:thinned",
        {"round(i * last / (MOST_TIMES - 1))": "round(i * last / MOST_TIMES)"},
        _PROFILE,
    ),
    Mutation(
        "a run that goes on measures everything again",
        "pat_vllm.cli.profile:Partial._take",
        {"self.done.update(": "set().update("},
        _PROFILE,
    ),
    Mutation(
        "essential points with drafts are forgotten",
        "pat_vllm.profiling.plan:_essential",
        {"if limits.draft_lengths": "if False"},
        _PLAN,
    ),
    Mutation(
        "the first point that matters less is measured at any price",
        "pat_vllm.profiling.plan:_in_rounds",
        {"if number == 0:": "if number <= 2:"},
        _PLAN,
    ),
    Mutation(
        "drafts have no room in a step",
        "pat_vllm.profiling.points:EngineLimits.allows",
        {"point.batch * (1 + point.drafts) + point.prefill": "point.batch + point.prefill"},
        _PLAN,
    ),
    Mutation(
        "an estimate takes a larger batch for free",
        "pat_vllm.profiling.plan:estimate",
        {"work / (s.batch + s.drafts), ": ""},
        _PLAN,
    ),
    Mutation(
        "all drafts are counted as right",
        "pat_vllm.profiling.stream:Stream.finished",
        {"1 + drafts - len(sampled)": "0"},
        _STREAM,
    ),
    Mutation(
        "all drafts are counted as wrong",
        "pat_vllm.profiling.stream:Stream.finished",
        {"1 + drafts - len(sampled)": "drafts"},
        _STREAM,
    ),
    Mutation(
        "drafts in flight are not counted ahead",
        "pat_vllm.profiling.stream:Stream.next",
        {"+= 1 + drafts": "+= 1"},
        _STREAM,
    ),
    Mutation(
        "no drafts are verified",
        "pat_vllm.profiling.stream:Stream.next",
        {"drafts = self._point.drafts": "drafts = 0"},
        _STREAM,
    ),
    Mutation(
        "the drafter is asked for what is verified",
        "pat_vllm.profiling.stream:Stream.next",
        {"= self._point.k": "= drafts"},
        _STREAM,
    ),
    Mutation(
        "a stream goes on without room",
        "pat_vllm.profiling.stream:Stream.full",
        {"+ self._point.drafts > ": "> 2 * "},
        _STREAM,
    ),
    Mutation(
        "an engine with other attention kernels has the same key",
        "pat_vllm.profiling.key:profile_key",
        {'"attention_backends": list(resolved.attention),': ""},
        _KEY,
    ),
    # ---------------------------------------------------------------- the doctor
    Mutation(
        "wrong log-probabilities pass",
        "pat_vllm.doctor.compare:compare_outputs",
        {"if not apart <= tolerance": "if apart > tolerance and False"},
        _COMPARE,
    ),
    Mutation(
        "any token that stock vLLM holds for unlikely passes",
        "pat_vllm.doctor.compare:compare_outputs",
        {"its is not None and best - its": "its is None or best - 9 - its"},
        _COMPARE,
    ),
    Mutation(
        "wrong scores pass",
        "pat_vllm.doctor.compare:compare_forced",
        {"if not _distance(a, b) <= tolerance": "if False"},
        _COMPARE,
    ),
    Mutation(
        "one rank with CUDA graphs is enough",
        "pat_vllm.doctor.session:captured",
        {"if not min(counts)": "if not max(counts)"},
        _COMPARE,
    ),
    Mutation(
        "rows in a wrong place pass",
        "pat_vllm.doctor.speed.reshard:_Weights.check",
        {"assert _same(found, expected)": "assert True"},
        ("tests/vllm/doctor/test_device.py",),
    ),
    Mutation(
        "stages go on after a failure",
        "pat_vllm.doctor.stages:run_stages",
        {'failed = name if stage.status == "failed" else None': "failed = None"},
        _STAGES,
    ),
    Mutation(
        "stock vLLM gets the options that are PAT's alone",
        "pat_vllm.doctor.plan:_for_both",
        {"if name not in only_pat": "if name"},
        _STAGES,
    ),
    Mutation(
        "memory is computed for the largest GPU",
        "pat_vllm.doctor.stages:_Stages._gpu",
        {"min(devices": "max(devices"},
        _STAGES,
    ),
    Mutation(
        "a link in one direction is enough",
        "pat_vllm.doctor.environment:_device_checks",
        {"not (reaches and facts.peers[b][a])": "not (reaches or facts.peers[b][a])"},
        _ENVIRONMENT,
    ),
    Mutation(
        "what a killed process has started goes on",
        "pat_vllm.doctor.child:_end_what_is_left",
        {"os.killpg(process.pid, signal.SIGKILL)": "pass"},
        _CHILD,
    ),
    Mutation(
        "a process that hangs is waited for",
        "pat_vllm.doctor.child:_follow",
        {"seen.hangs = True": "seen.hangs = False"},
        _CHILD,
    ),
    # ---------------------------------------------------------------- random models
    Mutation(
        "layers write over the phrase of a model that repeats itself",
        "pat_vllm.cli.random_model:_repeat",
        {"weight[:phrase] = 0": "pass"},
        ("tests/vllm/cli/test_random_model.py",),
    ),
    Mutation(
        "a token of the phrase calls for itself",
        "pat_vllm.cli.random_model:_repeat",
        {"ids[:phrase] + 1": "ids[:phrase]"},
        ("tests/vllm/cli/test_random_model.py",),
    ),
]
