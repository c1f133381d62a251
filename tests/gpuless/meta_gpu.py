"""A process whose GPU is a `MetaDevice`, and an executor of one rank of many in it.

Of vLLM, only what `replaced.py` lists is replaced: it starts by its own code, down to the launch of
kernels.
"""

from __future__ import annotations

import gc
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import set_current_vllm_config
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import run_method

from pat_vllm.worker.gpu_worker import PATGPUWorker
from tests.gpuless import platforms
from tests.gpuless.communicators import Recorder, imitate_communicators
from tests.gpuless.meta_device import CUDA, MetaDevice, OnCuda, launched
from tests.gpuless.replaced import replace

RANK = 0
_MULTIPROCESSORS = 132


def _same_node(group: Any, source_rank: int = 0) -> list[bool]:
    return [True] * dist.get_world_size(group)


def _as_it_is(*args: Any, **options: Any) -> None:
    return None


REPLACED: dict[str, Any] = {
    "vllm.distributed.parallel_state:in_the_same_node_as": _same_node,
    "vllm.distributed.device_communicators.custom_all_reduce:in_the_same_node_as": _same_node,
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.create_from_process_group": (
        staticmethod(_as_it_is)
    ),
    "vllm.model_executor.model_loader.dummy_loader:initialize_single_dummy_weight": _as_it_is,
    "vllm.model_executor.warmup.jit_warmup_triton_helper:_triton_key_deriver": (
        lambda kernel: lambda *args, **options: []
    ),
    "vllm.v1.worker.gpu_worker:report_usage_stats": _as_it_is,
}
"""What of vLLM is replaced, and by what, beside `_imitate_torch`, `_imitate_kernels`,
`communicators.py` and `platforms.py`; `replaced.py` says why."""


def replace_in_vllm() -> None:
    """Put in what is listed."""
    for where, replacement in REPLACED.items():
        module, path = where.split(":")
        owner, _, name = path.rpartition(".")
        replace(pkgutil.resolve_name(f"{module}:{owner}"), name, replacement)


class Stream:
    """CUDA's, on which everything is done at once."""

    cuda_stream = 0
    device = CUDA

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Event:
    """CUDA's, which has always happened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class CUDAGraph:
    """CUDA's, without a memory of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def replay(self, *args: Any, **options: Any) -> None:
        pass

    reset = capture_begin = capture_end = replay


class Uncompiled:
    """In place of `torch.compile`: the function itself, also where vLLM has it compiled ahead.

    A compiler for the device needs one. `test_compile.py` runs vLLM's on CPU.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def aot_compile(self, given: Any) -> _Ahead:
        return _Ahead(self._function)


class _Ahead:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def save_compiled_function(self, path: str) -> None:
        open(path, "w").close()

    def disable_guard_check(self) -> None:
        pass


def _nothing(*args: Any, **options: Any) -> None:
    pass


def imitate_torch(memory: MetaDevice, gpus: int) -> None:
    """Have torch say of a device what a driver would."""
    capability = current_platform.get_device_capability()
    assert capability is not None
    properties = SimpleNamespace(
        is_integrated=False,
        multi_processor_count=_MULTIPROCESSORS,
        total_memory=memory.total,
        major=capability.major,
        minor=capability.minor,
        name=current_platform.get_device_name(),
        gcnArchName="gfx942" if current_platform.is_rocm() else "",
        warp_size=32,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
    )
    import vllm.utils.torch_utils as torch_utils

    here = threading.local()
    here.value = Stream()
    replace(torch_utils, "_current_stream_tls", here)

    def set_stream(stream: Any) -> None:
        here.value = stream

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before, here.value = here.value, stream
        yield
        here.value = before

    of_memory: dict[str, Any] = {
        "empty_cache": _nothing,
        "synchronize": _nothing,
        "reset_peak_memory_stats": memory.reset_peak,
        "max_memory_allocated": lambda *args: memory.peak,
        "memory_allocated": lambda *args: memory.used,
        "memory_reserved": lambda *args: memory.used,
        "device_count": lambda: gpus,
    }
    accelerator: Any = torch.accelerator
    vars(accelerator).update(
        of_memory,
        get_memory_info=memory.free_and_total,
        memory_stats=lambda *args: {
            "allocated_bytes.all.peak": memory.peak,
            "allocated_bytes.all.current": memory.used,
        },
        set_device_index=_nothing,
        current_device_index=lambda: RANK,
        current_stream=lambda *args: here.value,
    )
    cuda: Any = torch.cuda
    vars(cuda).update(
        of_memory,
        _lazy_init=_nothing,
        mem_get_info=memory.free_and_total,
        is_available=lambda: True,
        current_device=lambda: RANK,
        set_device=_nothing,
        get_device_properties=lambda *args: properties,
        get_device_capability=lambda *args: (capability.major, capability.minor),
        get_device_name=lambda *args: properties.name,
        is_current_stream_capturing=lambda: False,
        current_stream=lambda *args: here.value,
        default_stream=lambda *args: here.value,
        set_stream=set_stream,
        stream=on_stream,
        Stream=Stream,
        Event=Event,
        CUDAGraph=CUDAGraph,
        graph=lambda *args, **options: nullcontext(),
        graph_pool_handle=lambda: (0, 1),
    )
    cuda.memory.get_allocator_backend = lambda: "imitated"
    torch.Event = Event  # type: ignore[assignment,misc]
    torch.compile = lambda function=None, **options: (  # type: ignore[assignment]
        Uncompiled if function is None else Uncompiled(function)
    )
    torch.Tensor.record_stream = _nothing  # type: ignore[assignment]
    platform = type(current_platform)
    replace(platform, "is_pin_memory_available", classmethod(lambda cls: True))
    units = classmethod(lambda cls, device_id=0: _MULTIPROCESSORS)
    replace(platform, "num_compute_units", units)
    from vllm.utils import platform_utils

    for answer in (platform_utils.is_pin_memory_available, platform_utils.is_uva_available):
        answer.cache_clear()


_PRODUCTS = {"LLMM1": (0, 1), "wvSplitK": (0, 1), "wvSplitKrc": (1, 0)}
"""ROCm's operators for few rows, which return what they make; places of weights and input."""


def _product(name: str, *args: Any) -> torch.Tensor:
    launched[name] += 1
    weights, rows = (args[place] for place in _PRODUCTS[name])
    return torch.empty(rows.shape[0], weights.shape[0], dtype=rows.dtype, device=CUDA)


def imitate_kernels(memory: MetaDevice) -> None:
    """Count launches, of Triton's kernels and of operators of vLLM's extensions, and do nothing."""
    from triton.runtime.interpreter import InterpretedFunction

    def launch(name: str, *args: Any, **options: Any) -> None:
        launched[name] += 1

    def of_triton(self: Any, *args: Any, **options: Any) -> None:
        launched[self.fn.__name__] += 1

    interpreted: Any = InterpretedFunction
    interpreted.run = of_triton
    interpreted.__getitem__ = lambda self, grid: partial(launch, self.fn.__name__)

    namespace: Any = torch._ops._OpNamespace
    known = namespace.__getattr__

    def lookup(self: Any, name: str) -> Any:
        try:
            return known(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith(("_C", "_moe_C", "_rocm_C")):
                raise
            if name == "get_cuda_view_from_cpu_tensor":
                return memory.view_of_host
            product = partial(_product, name) if name in _PRODUCTS else None
            return mock.MagicMock(side_effect=product or partial(launch, f"{self.name}.{name}"))

    namespace.__getattr__ = lookup

    def sample(first: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        launched["flashinfer sampling"] += 1
        return torch.empty(len(first), dtype=torch.int32, device=CUDA)

    def scheduler_metadata(batch_size: int, *args: Any, **options: Any) -> torch.Tensor:
        launched["get_scheduler_metadata"] += 1
        return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32, device=CUDA)

    # Kernels that return what they make.
    import flashinfer
    from vllm.v1.attention.backends import flash_attn

    replace(flash_attn, "get_scheduler_metadata", scheduler_metadata)
    flashinfer.sampling = SimpleNamespace(
        top_p_sampling_from_probs=sample,
        top_k_sampling_from_probs=sample,
        top_k_top_p_sampling_from_logits=sample,
    )


def imitate_ranks(gpus: int) -> None:
    """Have this process be one rank of many, whose collectives return at once."""
    init, new_group = dist.init_process_group, dist.new_group

    def init_fake(backend: Any = None, world_size: int = -1, rank: int = -1, **_: Any) -> None:
        init(backend="fake", store=FakeStore(), world_size=world_size, rank=rank)

    def gather(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    torch_distributed: Any = dist
    vars(torch_distributed).update(
        init_process_group=init_fake,
        new_group=lambda ranks=None, *args, **options: new_group(ranks, backend="fake"),
        all_gather_object=gather,
        broadcast_object_list=_nothing,
    )
    recorder = Recorder(RANK, gpus, _nothing)
    recorder.device = RANK
    imitate_communicators(recorder)
    connected = classmethod(lambda cls, devices: True)
    replace(type(current_platform), "is_fully_connected", connected)
    # Of those that write to a tensor that they get; an all-reduce returns one.
    for name in ("all_gather", "all_gatherv", "reduce_scatter", "broadcast", "send", "recv"):
        replace(PyNcclCommunicator, name, _nothing)


class OneRank(Executor):
    """Calls the worker of one rank, in this process."""

    uses_ray = supports_pp = False

    def _init_executor(self) -> None:
        config = self.vllm_config
        self.worker: Any = PATGPUWorker(config, RANK, RANK, "fake://", is_driver_worker=True)
        self.worker.init_device()
        self.worker.load_model()

    def collective_rpc(  # type: ignore[override]
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **options: Any
    ) -> list[Any]:
        if method == "initialize_from_config":  # as the wrapper of vLLM's worker processes
            args = (args[0][RANK],)
        return [run_method(self.worker, method, args, kwargs or {})]

    def check_health(self) -> None:
        pass


@contextmanager
def imitated_gpus(total: int, gpus: int) -> Iterator[MetaDevice]:
    """Inside, this process has a GPU of `total` bytes, one of `gpus`."""
    memory = MetaDevice(total)
    imitate_torch(memory, gpus)
    imitate_kernels(memory)
    imitate_ranks(gpus)
    replace_in_vllm()
    # What modules import that vLLM's warm-up asks about.
    platforms._STUBS = (*platforms._STUBS, "cuda", "cutlass", "quack", "torchvision")
    # vLLM collects garbage often: not among all that is imported.
    gc.collect()
    gc.freeze()
    with memory, OnCuda(memory):
        yield memory


def start(config: Any) -> tuple[Any, Any]:
    """Start a worker as an engine core does.

    Returns:
        The worker, and the engine core's `KVCacheConfig`.
    """
    core: Any = EngineCore.__new__(EngineCore)
    with set_current_vllm_config(config):
        core.model_executor = OneRank(config)
    kv_cache_config = core._initialize_kv_caches(config)
    return core.model_executor.worker, kv_cache_config
