"""A rank of `test_bare.py`: collectives as on a GPU that ranks share. It fails if one is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import vllm.envs as envs
from vllm import platforms

from benchmarks.gpu.bare import one_gpu
from pat_vllm.kv_transfer.exchange import CollectiveTransport
from tests.vllm.kv_transfer import test_exchange

staged: list[torch.dtype] = []
"""Types of the copies that gloo was given."""


def main(rank: int, address: str) -> None:
    assert one_gpu.RANKS == 2 == torch.accelerator.device_count()
    assert envs.VLLM_DISABLE_PYNCCL and not envs.VLLM_SKIP_P2P_CHECK
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    make = one_gpu.on_host

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        host = make(tensor)
        assert not host.is_inference()
        staged.append(host.dtype)
        return host

    one_gpu.on_host = on_host
    ones = torch.ones(4)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 4 and not staged, "tensors on CPU are gloo's affair"
    one_gpu.on_gpu = lambda tensor: True
    with torch.inference_mode():
        collectives(rank)
    staged.clear()
    transport = CollectiveTransport(test_exchange._world(), test_exchange.CPU)
    test_exchange._exchange_random_cases(rank, 2, transport, cases=6)
    assert set(staged) > {torch.int64}, "the exchange is not staged"
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        # Before this is a platform of whose kernels there are none.
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

        devices()
        linear_attention(qwen_gdn_linear_attn._resolve_gdn_prefill_backend)
        doctor()
    else:
        stream()


def collectives(rank: int) -> None:
    """As vLLM and PAT call them."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # 256 + 1 is no bfloat16; in float32 it is, and what is rounded is the sum.
        tensor = torch.tensor([1.0 + rank, 256.0 if rank else 1.0], dtype=dtype)
        assert dist.all_reduce(tensor) is None
        assert tensor.tolist() == [3.0, torch.tensor(257.0).to(dtype).item()]
        assert staged.pop() == torch.float32
    whole = torch.empty(4, 2, dtype=torch.bfloat16)
    part = torch.full((2, 2), float(rank), dtype=torch.bfloat16)
    dist.all_gather_into_tensor(whole, part, group=dist.group.WORLD)
    assert whole.tolist() == [[0.0] * 2] * 2 + [[1.0] * 2] * 2
    tensor = torch.arange(3) + 10 * rank
    work = dist.broadcast(tensor, src=1, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.tolist() == [10, 11, 12]
    # Rank 0 sends one element to itself and two to rank 1; rank 1 two to each.
    send = torch.arange(3 + rank) + 10 * rank
    counts, sizes = ([1, 2], [2, 2])[rank], ([1, 2], [2, 2])[rank]
    got = torch.empty(sum(sizes), dtype=torch.int64)
    work = dist.all_to_all_single(got, send, sizes, counts, None, async_op=True)
    work.wait()
    assert got.tolist() == ([0, 10, 11], [1, 2, 12, 13])[rank]
    assert len(staged) == 2 + 1 + 2


def devices() -> None:
    """On a platform with GPUs, of which every rank has the first that is visible."""
    from tests.gpuless.platforms import become

    become("sm90", 1)
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms import cuda, current_platform

    from pat_vllm.patches.groups import probe_p2p_between

    for visible, physical in ((None, 0), ("3,5", 3)):
        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        for rank in range(2):
            assert current_platform.logical_device_id_to_visible_device_id(rank) == 0
            assert current_platform.device_id_to_physical_device_id(rank) == physical
    assert current_platform.dist_backend == "gloo"
    assert cuda.CudaPlatformBase.device_count() == 2
    assert cuda.NvmlCudaPlatform.is_fully_connected([0, 0])
    assert custom_all_reduce._can_p2p(0, 2), "stock vLLM's groups"
    with probe_p2p_between(lambda tp: [1, 0]):
        assert custom_all_reduce._can_p2p(0, 2), "PAT's groups"


def stream() -> None:
    """A worker leaves the default stream when it has its device, before anything of PAT's."""
    from vllm.utils import torch_utils
    from vllm.v1.worker import gpu_worker

    done = []
    for name in ("init_distributed_environment", "ensure_model_parallel_initialized"):
        setattr(gpu_worker, name, lambda *args: done.append("groups"))
    for name in ("ensure_ec_transfer_initialized", "override_envs_for_eplb"):
        setattr(gpu_worker, name, mock.MagicMock())
    torch_utils.current_stream = lambda: done.append("stream")
    config = mock.MagicMock()
    config.parallel_config.distributed_timeout_seconds = None
    gpu_worker.init_worker_distributed_environment(config, 0, local_rank=0)
    assert done == ["groups", "groups", "stream"]


def linear_attention(resolve: Callable[[Any], tuple[str, str]]) -> None:
    """Its kernel for prompts is one that is there."""
    sizes = SimpleNamespace(linear_key_head_dim=64, linear_value_head_dim=64)
    model = SimpleNamespace(hf_text_config=sizes)
    config: Any = SimpleNamespace(additional_config={}, model_config=model)
    for there, backend in (("flashinfer cutlass", "flashinfer"), ("flashinfer", "triton")):
        setattr(one_gpu, "find_spec", lambda name, there=there: name in there)  # noqa: B010
        assert resolve(config) == ("auto", backend)


def doctor() -> None:
    """It finds a GPU for each rank."""
    from vllm.platforms.cuda import NvmlCudaPlatform

    from pat_vllm.doctor.machine import gpus

    setattr(platforms, "current_platform", NvmlCudaPlatform)  # noqa: B010
    torch.cuda.device_count = lambda: 1
    torch.cuda.mem_get_info = lambda at: (79 << 30, 80 << 30)
    torch.cuda.get_device_capability = lambda at: (9, 0)
    torch.cuda.get_device_name = lambda at: "a GPU"
    assert gpus(2) == "1 x a GPU (80.0 GiB, 9.0)"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
