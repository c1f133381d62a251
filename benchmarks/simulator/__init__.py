"""The predictor's test bench: a policy drives a simulated engine, step by step. Pure.

The policy is asked and told as `PATScheduler` does it, by a clock that is made up. Replicas run
freely: each has its own requests, its own queue and its own steps. What runs, waits and is
preempted is decided as vLLM's scheduler decides it, which a test compares.

What it grants itself, and an engine does not have:

* the profile's `kv_tokens` as they are; of modelled profiles, tests hold them against the engine's
  own (`tests/unit/start/test_memory_estimate.py`);
* steps and switches that take what a profile says: PAT's own work in a step, the wait for an idle
  engine's first request and the time of sampling, planning and compiling are no part of them;
* prompts of a group stay cached in a replica once they were computed there, and no other prefix is;
* KV always migrates: recomputing a request that has room is not simulated;
* acceptance that differs between requests, but not along a response.
"""
