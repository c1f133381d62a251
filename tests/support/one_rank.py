"""The exchange's transport in a process group of one rank. A program:

    python -m tests.support.one_rank BACKEND DEVICE ADDRESS

It fails if `torch.distributed` does not take one of the calls, or bytes do not arrive.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from pat_vllm.kv_transfer.exchange import CollectiveTransport, Exchange
from tests.vllm.kv_transfer import test_exchange


def main(backend: str, name: str, address: str) -> None:
    device = torch.device(name)
    on_gpu = device.type != "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    group = dist.new_group([0], backend=backend)
    transport = CollectiveTransport(group, device)
    # As in workers; gloo's threads may not write inference tensors.
    with torch.inference_mode(on_gpu):
        several_layers(transport, device)
        test_exchange._exchange_random_cases(0, 1, transport, device=device)
        assert Exchange(group, device, transport).measure(1 << 20) > 0
        if on_gpu:
            capture(device)
            several_layers(transport, device)
    dist.destroy_process_group()


def several_layers(transport: CollectiveTransport, device: torch.device) -> None:
    """Two at a time, of all sizes and of none."""
    for count in (0, 1, 1 << 20, 0, 3):
        layers = [torch.arange(count, device=device) + layer for layer in range(6)]
        transport.prepare([count], [count], torch.int64, room=1 << 30)
        assert transport.depth == 2
        for at, layer in enumerate(layers):
            transport.send.copy_(layer)
            transport.begin()
            if at % 2:
                for begun in layers[at - 1 : at + 1]:
                    (got,) = transport.finish()
                    assert torch.equal(got, begun), (count, at)
                    transport.done()
    transport.release()


def capture(device: torch.device) -> None:
    """A graph, while the group's own thread looks after what it has begun."""
    numbers, graph = torch.zeros(1000, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers += 1
    for _ in range(3):
        graph.replay()
    assert numbers.eq(3).all()


if __name__ == "__main__":
    main(*sys.argv[1:])
