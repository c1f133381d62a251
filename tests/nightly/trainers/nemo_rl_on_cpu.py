"""NeMo-RL's worker extension and engine creation, with sockets in the place of its NCCL broadcast.

Left out: the package of its policies, which refuses the transformers that vLLM 0.32 needs; what it
does to the files of the installed vLLM; the extension's `synchronize_device`, a name that workers
of vLLM's have themselves; and the sleep mode that it always asks for, which vLLM does not have on
CPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from vllm.v1.executor.ray_executor import RayDistributedExecutor

from tests.support.plain_weights import plain_weights
from tests.support.weight_transfer import Sockets


def _in_place_of(name: str, **contents: Any) -> None:
    """Have a module of NeMo-RL's with these contents; a package's other modules stay."""
    module = ModuleType(name)
    parent, _, child = name.rpartition(".")
    spec = importlib.util.find_spec(parent)
    assert spec is not None and spec.submodule_search_locations
    module.__path__ = [f"{folder}/{child}" for folder in spec.submodule_search_locations]
    vars(module).update(contents)
    sys.modules[name] = module


class Group(Sockets):
    """In the place of NeMo-RL's `StatelessProcessGroup`."""

    def __init__(self, master_address: str, port: int, rank: int, world_size: int) -> None:
        super().__init__(master_address, port, rank, world_size, None)

    def init_nccl_communicator(self, device: Any) -> None:
        """Joined already."""


def _receive(
    iterator: Iterator[tuple[str, tuple[Sequence[int], torch.dtype]]],
    group: Group,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, torch.Tensor]]], None],
) -> None:
    """In the place of `packed_broadcast_consumer`, which packs tensors on a CUDA device."""
    weights = [(name, torch.empty(*shape, dtype=dtype)) for name, (shape, dtype) in iterator]
    for _, weight in weights:
        group.broadcast(weight, src)
    post_unpack_func(weights)


# In a worker's process, for good.
_in_place_of("nemo_rl.models.policy")
_in_place_of("nemo_rl.distributed.stateless_process_group", StatelessProcessGroup=Group)
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # type: ignore[assignment]
plain_weights.apply()

from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.models.generation.vllm import utils, vllm_backend, vllm_worker  # noqa: E402

vllm_backend.packed_broadcast_consumer = _receive
Extension = vllm_backend.VllmInternalWorkerExtension
del Extension.synchronize_device


def engine_options(
    model: str, ranks: int, pat: dict[str, Any], precision: str = "float32", **of_vllm: Any
) -> dict[str, Any]:
    """What NeMo-RL starts its engine with, beside the model and the number of its GPUs.

    Args:
        pat: options, which it is given as docs/trainers.md says.
        precision: NeMo-RL's; with "fp8" weights have to be sent before anything is generated.
        of_vllm: more of its `vllm_kwargs`.
    """

    class Worker(vllm_worker.VllmGenerationWorkerImpl):
        def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
            self.llm = llm_kwargs

    config = {
        "model_name": model,
        "vllm_cfg": {
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": 1,
            "expert_parallel_size": 1,
            "gpu_memory_utilization": 0.5,
            "precision": precision,
            "kv_cache_dtype": "auto",
            "async_engine": False,
            "load_format": "dummy" if precision == "fp8" else "auto",
            "skip_tokenizer_init": False,
            "enforce_eager": True,
            "max_model_len": 512,
            "enable_prefix_caching": True,  # or it asks a CUDA device
        },
        "vllm_kwargs": {"additional_config": {"pat": pat}, **of_vllm},
    }
    nothing = mock.patch.object(vllm_worker, "_apply_vllm_patches", lambda *_, **__: None)
    # It patches the executor, which is not used, in this process.
    executor = mock.patch.object(RayDistributedExecutor, "collective_rpc")
    with nothing, executor, mock.patch.dict(os.environ):
        options: dict[str, Any] = Worker(config, bundle_indices=list(range(ranks)), seed=7).llm
    assert options.pop("model") == model and options.pop("tensor_parallel_size") == ranks
    assert options.pop("enable_sleep_mode")
    assert options["additional_config"] == {"pat": pat}
    extension = f"{Extension.__module__}.{Extension.__qualname__}"
    assert options["worker_extension_cls"] == extension
    return options | {"worker_extension_cls": f"{__name__}.Extension"}


def prompts_of(
    pictured: Sequence[tuple[list[int], list[Any]]], contents: list[str | None]
) -> list[dict[str, Any]]:
    """Prompts as NeMo-RL hands them to vLLM.

    Args:
        pictured: token ids and images of each.
        contents: the text of each, in its first turn; None: its token ids are sent.
    """
    token_ids = [torch.tensor(ids) for ids, _ in pictured]
    batch = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(token_ids, batch_first=True),
        "input_lengths": torch.tensor([len(ids) for ids in token_ids]),
        "vllm_content": contents,
        "vllm_images": [images for _, images in pictured],
    }
    prompts: list[dict[str, Any]] = utils.format_prompt_for_vllm_generation(BatchedDataDict(batch))
    return prompts
