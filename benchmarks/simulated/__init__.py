"""Policies on synthetic responses, simulated: `python -m benchmarks.simulated.elimination`."""
