"""Predictions that decide on switches. Pure Python: imports no vLLM."""
