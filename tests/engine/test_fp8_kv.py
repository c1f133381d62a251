"""KV in 8 bits: a switch moves its bytes as they are, and every layout has the same scales.

Rounding to 8 bits makes more of how sums are ordered: the log-probabilities of two static layouts
are some thousandths apart, with and without PAT. So those after a switch are held to that.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import pat_vllm
from pat_vllm.layout import Layout
from tests.engine.specs import FP8_KV, FP8_WINDOWS
from tests.engine.test_memory import test_an_engine_allocates_what_is_computed  # noqa: F401
from tests.engine.test_switch import (  # noqa: F401
    at_steps,
    batch,
    case,
    test_every_ordered_pair_of_layouts,
    test_null_blocks_are_clear_after_a_switch,
    test_recomputing_gives_the_same,
    test_what_moves_is_what_requests_hold,
)
from tests.support.engines import run, scheduler_of
from tests.support.pool import EngineSpec, go_home
from tests.support.same import FP8_KV_TOLERANCE, assert_same, assert_teacher_forced
from tests.support.stock import stock_answers

pytestmark = pytest.mark.engine(FP8_KV, FP8_WINDOWS)
ENGINES = {
    "test_an_engine_allocates_what_is_computed": [FP8_KV],
    "test_new_scales_drop_all_kv": [FP8_KV],
}


def sizes_of(llm: Any) -> list[int]:
    return [layout.tp for layout in pat_vllm.report(llm).layouts]


def test_each_layout_is_a_stock_engine(llm: Any, spec: EngineSpec) -> None:
    """Where vLLM's own kernels run, to the last bit but for chance; plain ones round otherwise."""
    options = {name: spec.options[name] for name in ("kv_cache_dtype", "max_num_batched_tokens")}
    tolerance = 1e-5
    if spec.pat["weights"] == "inplace":
        options["worker_extension_cls"] = "tests.support.weight_updates.WeightUpdates"
        tolerance = FP8_KV_TOLERANCE
    for tp in sizes_of(llm):
        go_home(llm)  # without prefixes of another layout
        outcomes = run(llm, batch(), at_steps(llm, {0: tp}))
        assert_same(outcomes, stock_answers(spec.model, batch(), ranks=tp, **options), tolerance)


Place = tuple[int, tuple[list[int], ...]]
"""The replica of a request, and its blocks that are not null, by group."""


def kv_on(worker: Any, layout: Layout, places: Mapping[str, Place]) -> dict[str, Any]:
    """Of the requests of this rank's replica, the KV of each layer: [blocks, heads, tokens,
    content]."""
    connector = worker._runtimes[layout].connector
    return {
        request_id: {
            name: view[blocks[connector._group_of[name]]].clone()
            for name, view in connector.kv_caches.items()
        }
        for request_id, (replica, blocks) in places.items()
        if replica == layout.replica_of(worker.rank)
    }


def whole_kv(llm: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The KV of an idle engine's requests, of all heads, by layer; by the test's names."""
    layout, places = pat_vllm.report(llm).layout, {}
    for replica in scheduler_of(llm).replica_set.replicas:
        for request_id, request in replica.scheduler.requests.items():
            ids = replica.scheduler.kv_cache_manager.get_block_ids(request_id)
            held = [kind.held(request.num_computed_tokens) for kind in replica.kinds]
            blocks = tuple(of[h.start : h.stop] for of, h in zip(ids, held, strict=True))
            places[request_id] = replica.index, blocks
    ranks = llm.collective_rpc(kv_on, args=(layout, places))
    return {
        request_id.partition("-")[0]: {
            name: torch.cat([ranks[rank][request_id][name] for rank in layout.ranks_of(replica)], 1)
            for name in ranks[layout.ranks_of(replica)[0]][request_id]
        }
        for request_id, (replica, _) in places.items()
    }


def test_kv_is_the_sources_byte_for_byte(llm: Any) -> None:
    seen: list[dict[str, dict[str, torch.Tensor]]] = []
    for source, target in itertools.permutations(sizes_of(llm), 2):
        seen.clear()

        def before_step(step: int, source: int = source, target: int = target) -> None:
            at_steps(llm, {0: source})(step)
            if step == 12:
                seen.append(whole_kv(llm))
                assert pat_vllm.switch(llm, tp=target)
                seen.append(whole_kv(llm))

        run(llm, batch(), before_step)
        before, after = seen
        assert before.keys() == after.keys() == batch().keys()
        for name, layers in before.items():
            assert all(kv.dtype == torch.uint8 and kv.any() for kv in layers.values())
            assert all(torch.equal(kv, after[name][layer]) for layer, kv in layers.items()), name
        kinds = {kv.numpy().tobytes() for layers in before.values() for kv in layers.values()}
        assert len(kinds) == sum(map(len, before.values())), "each layer has KV of its own"


def scales(worker: Any) -> set[tuple[float, ...]]:
    """Those of all layers and layouts."""
    layers = [
        layer
        for runtime in worker._runtimes.values()
        for layer in runtime.config.compilation_config.static_forward_context.values()
    ]
    return {
        (float(each._k_scale), each._k_scale_float, float(each._v_scale), each._v_scale_float)
        for each in layers
    }


def set_scales(worker: Any, scale: float) -> None:
    """As vLLM's reload of a checkpoint that has them, in the layout that is loaded."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        layer._k_scale.fill_(scale)
        layer._v_scale.fill_(scale)
        layer._k_scale_float = layer._v_scale_float = scale


def requests_of(llm: Any) -> list[Any]:
    replicas = scheduler_of(llm).replica_set.replicas
    return [each for replica in replicas for each in replica.scheduler.requests.values()]


def check_new_scales(llm: Any, tp: int, scale: float) -> None:
    jobs, dropped = batch(), list[int]()

    def before_step(step: int) -> None:
        at_steps(llm, {0: tp})(step)
        if step == 12:
            assert min(request.num_computed_tokens for request in requests_of(llm)) > 3
            llm.collective_rpc(set_scales, args=(scale,))
        if step == 13:
            dropped.extend(request.num_preemptions for request in requests_of(llm))

    outcomes = run(llm, jobs, before_step)
    assert dropped == [1] * len(jobs), "KV by the scales before was read"
    assert all(found == {(scale,) * 4} for found in llm.collective_rpc(scales))
    assert_teacher_forced(llm, jobs, outcomes, FP8_KV_TOLERANCE)


def test_new_scales_drop_all_kv(llm: Any) -> None:
    """Running requests' and cached prefixes', in whichever layout; and all layouts have them."""
    check_new_scales(llm, tp=2, scale=0.5)
    check_new_scales(llm, tp=1, scale=1.0)
