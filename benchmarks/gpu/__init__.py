"""What GPUs take for the parts of a switch and for decode steps: `python -m benchmarks.gpu`.

Needs torch, Triton and numpy, and neither vLLM nor a checkpoint, but for `--engines`.
"""
