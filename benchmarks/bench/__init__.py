"""Real engines, static and adaptive, take turns on the same batches: `python -m benchmarks.bench`.

The sides are engines that stay alive, each in a process of its own; they differ in PAT's options
and in nothing else. A workload's first batch warms them up; the adaptive engine is a new one for
each workload, so that it has learnt lengths from this workload only, and from its first batch on.
"""
