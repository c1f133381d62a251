"""What must hold of a worker's CUDA graphs. A program; see `programs.py`.

Answers go by the names of `CHECKS`: what a check complains about, or null.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.gpuless.graph_run import DRAFTS, Run, full_graphs
from tests.gpuless.programs import answer
from tests.gpuless.replaced import replace

RANK = 1
TOLERANCE = 1e-4
OFFLOADED = (7, 7)
"""Pool of graphs whose memory sleep mode offloads."""


def _check_hidden(run: Run, eager: Run) -> None:
    assert [phase for phase, _ in run.hidden] == [phase for phase, _ in eager.hidden]
    for (phase, hidden), (_, wanted) in zip(run.hidden, eager.hidden, strict=True):
        assert _close(hidden, wanted), f"{phase}: {hidden} {wanted}"


def _close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(tensor, other, rtol=TOLERANCE, atol=TOLERANCE)


def check_replays(run: Run, eager: Run) -> None:
    """Graphs compute what is computed without, whatever has happened since their capture."""
    _check_hidden(run, eager)
    # Or there would be nothing to see.
    first = dict(reversed(run.hidden))
    layout = next(phase for phase in first if phase.startswith("layout"))
    assert not _close(first["layout 0"], first["layout 1"])
    assert not _close(first[layout], first["updated"])
    assert not _close(first["updated"], first["updated elsewhere"])
    assert not _close(first["layout 0"], first["back"])
    assert _close(first["layout 0"], first["as at first"])


def check_own_graphs(run: Run) -> None:
    """Each layout has graphs for each size, which are replayed while it is active."""
    from tests.gpuless.graph_worker import MAX_NUM_SEQS, SIZES

    assert MAX_NUM_SEQS < max(SIZES) <= 2 * MAX_NUM_SEQS, "not all layouts have the same graphs"

    graphs = run.graphs
    assert set(graphs) == {
        captured.number for captured in run.driver.captured if captured.phase == "starting"
    }
    for tp in run.worker.runtimes:
        sizes = {(kind, size) for at, kind, size in graphs.values() if at == tp}
        full = {("FULL", size) for size in SIZES if size <= tp * MAX_NUM_SEQS}
        assert sizes == full | {("PIECEWISE", size) for size in SIZES}
    for phase, tp in run.active.items():
        used = {graphs[number][:2] for at, number in run.driver.replayed if at == phase}
        assert used == {(tp, "FULL"), (tp, "PIECEWISE")}, phase


def check_drafts() -> None:
    """Steps of each draft length replay graphs of theirs, of the active layout.

    They compute what is computed without graphs.
    """
    run = Run.start(2, RANK, drafts=DRAFTS).verify()
    _check_hidden(run, Run.start(2, RANK, graphs=False, drafts=DRAFTS).verify())
    graphs = {
        graph.number: (tp, description.uniform_token_count)
        for tp, runtime in run.worker.runtimes.items()
        for description, graph in full_graphs(runtime.runner).items()
    }
    for tp in run.worker.runtimes:
        for drafts in range(DRAFTS + 1):
            phase = f"tp={tp}, {drafts} drafts"
            replayed = [number for at, number in run.driver.replayed if at == phase]
            used = [graphs[number] for number in replayed if number in graphs]
            # A step of a token each comes before the last one.
            assert used[-1:] == [(tp, 1 + drafts)], f"{phase}: {used}"
            assert set(used) == {(tp, 1), (tp, 1 + drafts)}, f"{phase}: {used}"


def check_pools(run: Run) -> None:
    """All graphs share a pool, and a stream of capture. Each layout was measured with graphs in
    another pool, which are gone."""
    gc.collect()
    thrown_away = [captured for captured in run.driver.captured if captured.phase == "measuring"]
    kept = [captured for captured in run.driver.captured if captured.phase == "starting"]
    assert len(thrown_away) + len(kept) == len(run.driver.captured)
    offloaded = run.worker.vllm_config.use_cumem_cudagraph_pool
    pool = OFFLOADED if offloaded else run.worker.graph_pool
    assert {captured.pool for captured in kept} == {pool}
    assert len({captured.stream for captured in run.driver.captured}) == 1, (
        "memory is used again on one"
    )
    assert pool not in {captured.pool for captured in thrown_away}
    assert all(captured.graph() is not None for captured in kept)
    assert all(captured.graph() is None for captured in thrown_away)
    groups = {
        str(runtime.layout) for runtime in run.worker.runtimes.values() if runtime.layout.tp > 1
    }
    measured = {frozenset(each.group for each in captured.collectives) for captured in thrown_away}
    assert measured == {frozenset[str](), *(frozenset({group}) for group in groups)}


def check_order(start: Callable[[int], Run], ranks: Iterable[int]) -> None:
    """All ranks capture the same graphs with the same collectives in one order: the base layout's
    first, those of mixed batches before those of decoding ones, large ones before small ones."""
    orders = []
    for rank in ranks:
        run = start(rank)
        graphs = run.graphs
        names = {runtime.layout.tp: str(runtime.layout) for runtime in run.worker.runtimes.values()}
        order = []
        for captured in run.driver.captured:
            if captured.phase == "starting":
                tp, kind, size = graphs[captured.number]
                assert {each.group for each in captured.collectives} <= {names[tp]}
                order.append((tp, kind == "FULL", -size, tuple(captured.collectives)))
        orders.append(order)
        collectives = {tp: 0 for tp in names}
        for tp, _, _, those in order:
            collectives[tp] += len(those)
        assert [tp for tp, count in collectives.items() if not count] == [1]
    assert all(order == orders[0] for order in orders)
    sizes = [each[:3] for each in orders[0]]
    assert sizes == sorted(sizes)


@contextmanager
def _offloading() -> Iterator[None]:
    """Sleep mode offloads the memory of graphs, by a pool of vLLM's allocator."""
    import vllm.compilation.cudagraph_pool as module
    from vllm.config import VllmConfig

    allocator = SimpleNamespace(cudagraph_pool=lambda: nullcontext(OFFLOADED))
    with (
        replace(VllmConfig, "use_cumem_cudagraph_pool", True, mock.patch.object),
        replace(module, "get_mem_allocator_instance", lambda: allocator, mock.patch.object),
    ):
        yield


def _driven(ranks: int = 2, **options: Any) -> None:
    """A worker through switches and updates."""
    run = Run.start(ranks, RANK, **options).drive()
    check_pools(run)
    check_own_graphs(run)
    options = {name: value for name, value in options.items() if name != "warm"}
    check_replays(run, Run.start(ranks, RANK, graphs=False, **options).drive())


def _offloaded_pools() -> None:
    with _offloading():
        check_pools(Run.start(2, RANK))


CHECKS: dict[str, Callable[[], None]] = {
    "V2": lambda: _driven(4, warm=True),
    "drafts": check_drafts,
    "pools, offloaded": _offloaded_pools,
    "order": lambda: check_order(lambda rank: Run.start(4, rank), (0, 3)),
    "experts tp": lambda: _driven(experts="tp"),
    "V1": lambda: _driven(use_v2=False, warm=True),
    "experts ep": lambda: _driven(4, experts="ep"),
    "V1, order": lambda: check_order(lambda rank: Run.start(2, rank, use_v2=False), (0, 1)),
}
EVERY_CHANGE = [name for name in CHECKS if name not in ("experts ep", "V1, order")]
"""The others are further combinations of the same."""


def _complaint(check: Callable[[], None]) -> str | None:
    try:
        check()
    except AssertionError as error:
        return str(error)[:2000] or "".join(traceback.format_tb(error.__traceback__, -1))
    except Exception:  # or the checks after it would not be made
        return traceback.format_exc()[-2000:]
    return None


def main(out: str, *wanted: str) -> None:
    """Make the wanted checks."""
    from tests.gpuless.graph_worker import prepare_process

    prepare_process()
    gc.collect()
    gc.freeze()  # or vLLM, which often collects, looks at all that was imported each time
    gc.disable()
    for name, check in CHECKS.items():
        if name in wanted:
            answer(out, name, _complaint(check))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
