"""Copies within device memory: Triton kernels on GPUs, torch elsewhere. Imports no vLLM."""
