"""SkyRL's worker extension and weight transfer; sockets in NCCL's place, files in CUDA IPC's."""

from __future__ import annotations

import typing

import typing_extensions

from tests.support.weight_transfer import mapped_files, without_cuda

_on_cpu = without_cuda(), mapped_files()
for _context in _on_cpu:
    _context.__enter__()  # in a worker's process, for good
# SkyRL is for Python 3.12, from which on pydantic takes this one.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]

from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import (  # noqa: E402
    NewInferenceWorkerWrap,
)

__all__ = ["NewInferenceWorkerWrap"]
