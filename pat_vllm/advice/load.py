"""The batch that an engine's options let one expect. Pure."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from pat_vllm.advice.lengths import learnt
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import FileError
from pat_vllm.memory.buffers import EngineShape
from pat_vllm.policy_config import PredictorPolicyConfig
from pat_vllm.simulator.modelled.batch_time import Load


def expected_load(pat: PATConfig, engine: EngineShape, ranks: int) -> Load:
    """As many requests as an engine's limits let one expect, as long as its `lengths_file` says if
    it can be read. The engine core sets one aside that cannot."""
    load = Load.usual(engine.max_num_seqs, ranks, engine.max_model_len)
    policy = pat.policy
    if not isinstance(policy, PredictorPolicyConfig) or policy.lengths_file is None:
        return load
    found: tuple[int, ...] = ()
    with contextlib.suppress(FileError):
        found = learnt(Path(policy.lengths_file))
    return replace(load, lengths=found) if found else load
