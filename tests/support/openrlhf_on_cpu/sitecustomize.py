"""Stand-ins for a GPU machine, in every process that has this folder on PYTHONPATH.

Test support only: OpenRLHF 0.11.2 is written for CUDA. See `openrlhf_on_cpu.py` for what is put in
its place. No patched module is imported here.
"""

import os
import sys
from pathlib import Path

import openrlhf_on_cpu as patches

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "plain_weights"))
sys.path.append(str(Path(__file__).parents[1] / "ray_on_cpu"))
import patient_ray
import plain_weights
from on_import import patch_on_import

os.environ.setdefault("DS_ACCELERATOR", "cpu")
patch_on_import(
    {
        patient_ray.MODULE: patient_ray.patch,
        "ray._private.worker": patches.give_gpus,
        "vllm.platforms.cpu": patches.look_like_gpus,
        **plain_weights.ON_IMPORT,
        "openrlhf.utils.distributed_util": patches.sync_over_gloo,
        "openrlhf.trainer.ray.utils": patches.name_gpus,
        "openrlhf.trainer.ray.vllm_worker_wrap": patches.receive_on_cpu,
        "openrlhf.utils.deepspeed.deepspeed": patches.train_on_cpu,
    }
)
