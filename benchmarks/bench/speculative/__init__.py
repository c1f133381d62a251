"""Workloads with speculative decoding: what layouts gain and what draft lengths gain."""
