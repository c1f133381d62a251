"""NeMo-RL's worker extension with its patches of vLLM for fp8, on CPU. For worker processes only.

NeMo-RL has its Ray executor apply the patches, in whose place PAT's comes.
"""

from __future__ import annotations

import pytest

from tests.nightly.trainers import nemo_rl_on_cpu
from tests.support import fp8_on_cpu

fp8_on_cpu.apply(pytest.MonkeyPatch())

from nemo_rl.models.generation.vllm.quantization import fp8  # noqa: E402

fp8.apply_fp8_patches(None, fp8.FP8Config(model_parallel_size=2))
Extension = nemo_rl_on_cpu.Extension
