"""Measurements of PAT against stock vLLM on one machine; `python -m benchmarks.NAME` for each."""
