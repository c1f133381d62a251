"""vLLM's CUDA build, carried in pieces to a machine with one GPU and no network, and run there.

`pack` makes the pieces, `receive` puts them together on the machine, `run` runs steps there. The
ranks of an engine share the one GPU (`one_gpu`).
"""
