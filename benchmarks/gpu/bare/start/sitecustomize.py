"""With this folder on PYTHONPATH and PAT_ONE_GPU=N, N ranks share one GPU (`one_gpu.py`).

A `sitecustomize`, because an engine's core and its workers are new processes, and what is replaced
there has to be replaced before vLLM is imported.
"""

import os

if os.environ.get("PAT_ONE_GPU"):
    from benchmarks.gpu.bare.one_gpu import install

    install()
