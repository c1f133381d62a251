# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in reports, metrics, profiles and the doctor."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/unit/reporting/test_history.py": [
        ("drafts of a batch are counted again in the next", "reporting.history:EngineHistory.idle", "self._counting.clear()", "pass"),
        ("each step with drafts is a sample of its own", "reporting.history:EngineHistory.drafts", "self._counting.get(replica)", "None"),
        ("a report since a time begins after it", "reporting.history:RingBuffer.since", "bisect.bisect_left", "bisect.bisect_right"),
        ("expected refusals are errors", "reporting.history:EngineHistory.refused", "not refused.expected", "refused.expected"),
    ],
    "tests/unit/reporting/test_report.py": [
        ("a printed report has lines of all that it holds", "reporting.text:describe_report", 'lines = [f"({earlier}', '_ = [f"({earlier}'),
        ("a report of any format is read", "reporting.values:Report.load", 'content["format"] != FORMAT', "False"),
    ],
    "tests/unit/reporting/test_report_plot.py": [
        ("requests seem to go on after a batch", "reporting.run:Run.live", "counts += [(batch.at, 0) for batch in self.savings]", "pass"),
        ("a saving is drawn with its sign turned", "reporting.report_plot:_draw_costs", "b.realised.fixed - b.realised.drafting", "b.realised.drafting - b.realised.fixed"),
    ],
    "tests/unit/reporting/test_rollout.py": [
        ("a rollout's line has the switches of the ones before", "reporting.text:describe", "Run(report, started, math.inf)", "Run(report, 0.0, math.inf)"),
    ],
    "tests/unit/metrics/test_metric_updates.py": [
        ("replicas that are gone keep their requests", "metrics.metric_updates:MetricUpdates.state", "range(len(num_seqs), before)", "range(0)"),
        ("gauges travel though they have not changed", "metrics.metric_updates:MetricUpdates._set", "if self._shown.get(series) != value:", "if True:"),
        ("a counter may fall", "metrics.metric_updates:MetricUpdates.saved", "max(0.0, getattr(times, way))", "getattr(times, way)"),
    ],
    "tests/vllm/metrics/test_prometheus.py": [
        ("a batch's saving is told twice", "scheduler.monitor:Monitor.idle", "self._savings_from = math.nextafter(batch.at, math.inf)", "pass"),
        ("a histogram's seconds are counted as switches", "metrics.metric_updates:MetricUpdates.switched", "(switch.reason,), switch.seconds", "(switch.reason,), 1"),
        ("events without outputs are lost", "scheduler.stats:send_metrics", "carrier is None and updates.has_events", "False"),
    ],
    "tests/unit/profiling/test_samples.py": [
        ("a cached profile of another engine is taken", "profiling.cache:find", "profile.check(key, path)", "pass"),
    ],
    "tests/unit/cli/test_profile.py": [
        ("a run that goes on measures everything again", "cli.profile:unmeasured", "if not is_measured(point)", "if True"),
        ("a run that goes on keeps noisy steps", "cli.profile:measured_before", "if not unsettled(step)", "if True"),
    ],
    "tests/engine/test_profiling.py::test_a_slow_engine_takes_longer_rather_than_a_profile_that_is_not_kept[dense]": [
        ("a slow engine's profile is never complete", "profiling.runner:Profiler.run", "left += plan.overtime", "pass"),
    ],
    "tests/unit/profiling/test_quality.py": [
        ("a noisy profile is good enough", "profiling.quality:problems", "MOST_UNSETTLED * len(steps)", "len(steps)"),
        ("what cannot become complete is gone on with", "profiling.quality:becomes_complete", "is_complete(skipped, planned) and", ""),
        ("outliers make a profile noisy", "profiling.quality:spread", "statistics.quantiles(times, n=4)", "(min(times), statistics.median(times), max(times))"),
    ],
    "tests/unit/profiling/test_grid.py": [
        ("essential points with drafts are forgotten", "profiling.grid:_rows", "_Row(0, (few,), k=lengths[-1:]),", ""),
        ("drafts have no room in a step", "profiling.grid:EngineLimits.allows", "point.batch * (1 + point.drafts) + point.prefill", "point.batch + point.prefill"),
    ],
    "tests/vllm/profiling/test_synthetic_steps.py": [
        ("all drafts are counted as wrong", "profiling.synthetic_steps:SyntheticSteps.finished", "1 + drafts - len(sampled)", "drafts"),
        ("no drafts are verified", "profiling.synthetic_steps:SyntheticSteps.next", "drafts = self._point.drafts", "drafts = 0"),
        ("the drafter is asked for what is verified", "profiling.synthetic_steps:SyntheticSteps.next", "= self._point.k", "= drafts"),
    ],
    "tests/vllm/profiling/test_key.py": [
        ("an engine with other attention kernels has the same key", "profiling.key:profile_key", '"attention_backends": list(resolved.attention),', ""),
    ],
    "tests/unit/doctor/test_compare.py": [
        ("wrong log-probabilities pass", "doctor.compare:_apart", "<= tolerance", "<= 9.9"),
        ("stock vLLM's rounding is none of its noise", "doctor.compare:Reference.noise", "self.rounding", "0.0"),
        ("wrong scores pass", "doctor.compare:Reference.compare_forced", "_apart(a, b, self.tolerance, where)", "0.0"),
    ],
    "tests/unit/doctor/test_stages.py": [
        ("nobody asks what rounding does in 16 bits", "doctor.tasks:stock_of", '== "float32"', '!= "float64"'),
        ("stock vLLM that aborts at its end has failed", "doctor.stages:_Stages._child", "and ended.answer is None", ""),
        ("stages go on after a failure", "doctor.stages:run_stages", 'failed = name if done.status == "failed" else None', "failed = None"),
        ("all stages run beside one that is named", "doctor.stages:run_stages", "if options.stage and name not in", "if False and name not in"),
        ("what is named needs --all as well", "doctor.stages:_Stages.engines", "self.options.all or self.options.stage", "self.options.all"),
        ("stock vLLM gets the options that are PAT's alone", "doctor.tasks:stock_of", "if name not in _NOT_STOCK", "if name"),
        ("compiled engines are compared with an eager one", "doctor.tasks:stock_of", "{**engine, **changed}", '{**engine, "enforce_eager": True, **changed}'),
        ("the user's policy is replaced by a static one", "doctor.tasks:as_used", "pat = dict(options.pat)", 'pat = {**options.pat, "policy": {"kind": "static", "tp": 1}}'),
        ("the KV cache of the user's engine is of a fixed size", "doctor.tasks:as_used", "    if not on_cpu:", "    engine.setdefault(\"kv_cache_memory_bytes\", 1 << 28)\n    if not on_cpu:"),
        ("the user's engine has few sequences", "doctor.tasks:as_used", "    if not on_cpu:", "    engine.setdefault(\"max_num_seqs\", 16)\n    if not on_cpu:"),
        ("what is not the user's is not told", "doctor.tasks:_not_the_users", "if has.get(name) != given.get(name)", "if name in given and has.get(name) != given.get(name)"),
        ("the doctor writes what it has learnt to the user's file", "doctor.tasks:as_used", 'files = ("profile", "lengths_file")', 'files = ("profile",)'),
        ("all prompts are short", "doctor.tasks:prompts", "longest > 40 and", "False and"),
        ("CPU drafts are taken on GPUs", "doctor.tasks:as_used", 'facts.runner != "V2"', "True"),
    ],
    "tests/unit/cli/test_doctor.py": [
        ("a router's choice is of rounding", "cli.random_config:_mixture", '"topk_group": groups', '"topk_group": 1'),
        ("a stage that is not there runs nothing", "cli.doctor:examine", "if name not in STAGES", "if name is None"),
        ("the report is written at the end alone", "cli.doctor:examine", "if output is not None:  # now", "if output is not None and stage.name == \"as used\":  # now"),
        ("engines of other stages are none", "doctor.report:Report.conclusion", "set(passed) <= set(WITHOUT_ENGINES)", "\"eager\" not in passed"),
    ],
    "tests/unit/doctor/test_engine.py": [
        ("no drafts at all pass", "doctor.engine:PATEngine.with_drafts", 'raise RuntimeError("all responses had ended before the engine drafted")', "pass"),
        ("outputs after an update by IPC are not compared", "doctor.engine:PATEngine.update_by_ipc", "{self._in_all_layouts(self.first)}", "none"),
        ("lost weights are left lost", "doctor.engine:PATEngine._reload", 'self.llm.collective_rpc("reload_weights", kwargs=weights)', "pass"),
    ],
    "tests/vllm/doctor/test_ipc.py": [
        ("weights that came by IPC are not loaded", "doctor.in_workers:load_by_ipc", "worker.model_runner.model.load_weights(weights())", "list(weights())"),
    ],
    "tests/unit/doctor/test_environment.py": [
        ("a link in one direction is enough", "doctor.environment:_device_checks", "not (reaches and facts.peers[b][a])", "not (reaches or facts.peers[b][a])"),
    ],
    "tests/vllm/doctor/test_environment.py::test_latent_and_linear_attention": [
        ("latent attention has the backend of others", "doctor.environment:_choices", "use_mla=latent", "use_mla=False"),
    ],
    "tests/unit/doctor/test_child.py": [
        ("what a killed process has started goes on", "doctor.child:_end_what_is_left", "os.killpg(process.pid, signal.SIGKILL)", "pass"),
        ("a process that hangs is waited for", "doctor.child:run_module", "hangs = process.poll() is None", "hangs = False"),
    ],
    "tests/vllm/cli/test_random_model.py": [
        ("layers write over the phrase of a model that repeats itself", "cli.random_model:_repeat", "weight[:phrase] = 0", "pass"),
    ],
    "tests/vllm/benchmarks/test_gpu.py": [
        ("rows in a wrong place pass", "benchmarks.gpu.reshard:_Weights.check", "assert _same(shard, expected)", "assert True"),
    ],
})
# fmt: on
