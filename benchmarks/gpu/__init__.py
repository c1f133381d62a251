"""What one GPU takes for the parts of a switch and for a decode step: `python -m benchmarks.gpu`.

Needs torch, Triton and numpy, and neither vLLM nor a checkpoint.
"""
