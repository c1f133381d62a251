"""With PAT_ONE_GPU=N and this on PYTHONPATH, ranks share a GPU in every process that starts."""

import os

if os.environ.get("PAT_ONE_GPU"):
    from benchmarks.gpu.bare.one_gpu import install

    install()
