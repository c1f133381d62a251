"""Sizes that the arithmetic of memory takes from vLLM, and from our kernels, are theirs."""

from __future__ import annotations

import vllm.envs as envs
from vllm.distributed.device_communicators import all_reduce_utils
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS
from vllm.v1.worker.gpu.sample import logit_bias

from pat_vllm.kernels import swap
from pat_vllm.models import model_size
from pat_vllm.start import buffers
from pat_vllm.start import memory_estimate as estimate

CAPABILITY = "9.0"


def test_communicators() -> None:
    symmetric = all_reduce_utils.SYMM_MEM_ALL_REDUCE_MAX_SIZES[CAPABILITY]
    custom = all_reduce_utils.CUSTOM_ALL_REDUCE_MAX_SIZES[CAPABILITY]
    gather = CustomAllreduce._DEFAULT_MNNVL_ALL_GATHER_MAX_SIZES
    for ranks in (2, 4, 6, 8):
        assert estimate.SYMMETRIC_MEMORY[ranks] == symmetric[ranks]
        assert estimate.CUSTOM_ALL_REDUCE[ranks] == min(custom[ranks], 8 << 20)
        assert estimate.MULTICAST_ALL_GATHER[ranks] == gather[ranks]
    assert CustomAllreduce._DEFAULT_REDUCE_SCATTER_MAX_SIZE == estimate.REDUCE_SCATTER
    assert CustomAllreduce._DEFAULT_ALL_GATHER_MAX_SIZE <= estimate.REDUCE_SCATTER


def test_buffers() -> None:
    tokens = logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS + 2 * logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    tokens += logit_bias.MAX_NUM_STOP_TOKEN_IDS + MAX_LOGPROB_TOKEN_IDS
    tokens += envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS + envs.VLLM_MAX_NUM_BAD_WORDS
    assert 4 * tokens == buffers._SAMPLING
    assert envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE == buffers.FLASHINFER_WORKSPACE


def test_weights() -> None:
    assert vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE == model_size.VOCAB_PADDING
    assert swap._CHUNK_BYTES == model_size.SWAP_CHUNK_BYTES
