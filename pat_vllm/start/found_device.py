"""What a driver says of this machine's devices, without a context on any of them."""

from __future__ import annotations

import logging
from contextlib import suppress

from pat_vllm.modelled.gpus import Device, Link

logger = logging.getLogger(__name__)


def found_device(ranks: int, index: int = 0) -> Device | None:
    """What a rank of an engine runs on; on CPU, its part of the host's memory. None: nothing is
    known.

    Args:
        ranks: number of the engine's ranks, which have the first GPUs that the process sees.
        index: which of these GPUs to look at.
    """
    from vllm.platforms import current_platform as platform

    link: Link | None = None
    kept, bandwidth = 0, 0.0
    try:
        memory = platform.get_device_total_memory(index)
        if platform.is_cpu():
            return Device(memory // ranks)
        found = platform.get_device_capability(index)
        name = platform.get_device_name(index)
    except Exception as error:  # the driver's library raises its own, whichever that is
        logger.debug("PAT: nothing is known of the devices' memory: %s", error)
        return None
    capability = "" if found is None else found.as_version_str()
    with suppress(Exception):  # as above; or there are fewer GPUs
        physical = [platform.device_id_to_physical_device_id(rank) for rank in range(ranks)]
        link = "nvlink" if platform.is_fully_connected(physical) else "pcie"
    with suppress(Exception):  # as above; or the driver is not NVIDIA's
        kept, bandwidth = _by_nvml(platform.device_id_to_physical_device_id(index))
    return Device(memory - kept, capability, name, link, bandwidth)


def _by_nvml(physical: int) -> tuple[int, float]:
    """Bytes that the driver keeps of a GPU's memory, and the memory's bytes per second."""
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    nvml.nvmlInit()
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(physical)
        kept = nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2).reserved
        megahertz = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)
        bits = nvml.nvmlDeviceGetMemoryBusWidth(gpu)
    finally:
        nvml.nvmlShutdown()
    return int(kept), 2 * megahertz * 1e6 * bits / 8  # a line carries two bits in a cycle
