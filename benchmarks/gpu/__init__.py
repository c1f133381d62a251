"""What GPUs take for the parts of a switch: `python -m benchmarks.gpu`.

Needs torch, Triton and numpy, and neither vLLM nor a checkpoint, but for `--engines`.
"""
