"""Mistakes in PAT that the checks of CUDA graphs must see (`tests/gpuless/graph_checks.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_WORKER = "pat_vllm.worker.worker:PATWorkerMixin."
_GPU_WORKER = "pat_vllm.worker.gpu_worker:PATGPUWorker."


@dataclass(frozen=True)
class Mistake:
    """A change of a function of PAT's that a check must see.

    Attributes:
        changes: see `tests.support.mutation.mutated`.
    """

    check: str
    function: str
    changes: Mapping[str, str]


def _also(code: str, more: str) -> dict[str, str]:
    return {code: f"{code}; {more}"}


_OTHER_KV = (
    "[setattr(layer, 'kv_cache', layer.kv_cache.clone()) for one in self._runtimes.values() "
    "for layer in one.config.compilation_config.static_forward_context.values()]"
)
_POOL = "type(__import__('vllm.platforms').platforms.current_platform)._global_graph_pool"

MISTAKES = {
    "a switch leaves rows where they are": Mistake(
        "replays",
        _WORKER + "pat_switch",
        {"weight_bytes = self._weights.arrange(target.layout)": "weight_bytes = 0"},
    ),
    "a switch allocates an input": Mistake(
        "replays",
        _WORKER + "pat_switch",
        _also(
            "self._activate(target)",
            "target.runner.input_buffers.positions = target.runner.input_buffers.positions.clone()",
        ),
    ),
    "a switch allocates the KV cache": Mistake(
        "replays", _WORKER + "pat_switch", _also("self._activate(target)", _OTHER_KV)
    ),
    "the KV cache wakes up elsewhere": Mistake(
        "replays", _GPU_WORKER + "wake_up", _also("super().wake_up(tags)", _OTHER_KV)
    ),
    "buffers wake up elsewhere": Mistake(
        "replays",
        _GPU_WORKER + "wake_up",
        {"buffer.copy_(buffers[name])": "buffer.data = buffers[name]"},
    ),
    "new weights stay elsewhere": Mistake(
        "replays",
        "pat_vllm.weights.inplace:InPlaceShards.refresh",
        {"weight.tensor.copy_(new)": "pass"},
    ),
    "rows stay the base layout's after an update": Mistake(
        "replays",
        "pat_vllm.worker.layout_weights:LayoutWeights.refresh",
        {"self._strategy.arrange(active)": "pass"},
    ),
    "a switch keeps the runner": Mistake(
        "own graphs",
        _WORKER + "pat_switch",
        _also("self._activate(target)", "self.model_runner = source.runner"),
    ),
    "a switch takes the other layout's graphs along": Mistake(
        "own graphs",
        _WORKER + "pat_switch",
        _also(
            "self._activate(target)",
            "target.runner.cudagraph_manager.graphs = source.runner.cudagraph_manager.graphs",
        ),
    ),
    "graphs end with their layout": Mistake(
        "own graphs",
        _WORKER + "pat_switch",
        _also(
            "self._handover.clear(source.runner)",
            "source.runner.cudagraph_manager.release_graphs()",
        ),
    ),
    "capture before the KV cache is there": Mistake(
        "addresses",
        _WORKER + "compile_or_warm_up_model",
        _also("language_model += times.language_model", _OTHER_KV),
    ),
    "capture before the weights are there": Mistake(
        "addresses",
        _WORKER + "compile_or_warm_up_model",
        _also(
            "language_model += times.language_model",
            "[setattr(p, 'data', p.data.clone()) for p in runtime.runner.model.parameters()]",
        ),
    ),
    "a switch moves the slot mapping": Mistake(
        "addresses",
        _WORKER + "pat_switch",
        _also(
            "self._activate(target)",
            "source.runner.block_tables.slot_mappings = "
            "source.runner.block_tables.slot_mappings.clone()",
        ),
    ),
    "a KV buffer for each layout": Mistake(
        "shared",
        "pat_vllm.kv_transfer.kv_buffer:_Allocation.__torch_function__",
        {"if self._shared.buffer is None:": "if True:"},
    ),
    "penalty counters for each layout": Mistake(
        "shared",
        _WORKER + "load_model",
        {"share_buffers([*self._runtimes.values()][:count], self._handover)": "pass"},
    ),
    "token ids for each layout": Mistake(
        "shared",
        "pat_vllm.patches.runners:token_ids_of",
        {"size[0] > most_rows": "True"},
    ),
    "graphs for the longest drafts only": Mistake(
        "drafts", "pat_vllm.speculation:every_length", {"sorted(lengths)": "[max(lengths)]"}
    ),
    "drafts of length 0 are looked for": Mistake(
        "drafts",
        "pat_vllm.patches.drafts:_asks_for_none",
        {'options.get("num_speculative_tokens") == 0': "False"},
    ),
    "a pool for each layout": Mistake(
        "pools",
        _WORKER + "initialize_from_config",
        _also("runtime.check_kv_cache(config)", f"{_POOL} = None"),
    ),
    "the pool for measuring stays": Mistake(
        "pools",
        _GPU_WORKER + "determine_available_memory",
        {
            "return self.available_kv_cache_memory_bytes": f"{_POOL} = self.driver.captured[-1]"
            ".pool; return self.available_kv_cache_memory_bytes"
        },
    ),
    "one layout is measured for all": Mistake(
        "pools",
        _WORKER + "_enter",
        {
            "self._activate(runtime)": "self._activate(runtime if self.driver.phase == 'starting' "
            "else self._base)"
        },
    ),
    "a rank captures layouts in another order": Mistake(
        "order",
        _WORKER + "compile_or_warm_up_model",
        {
            "for layout, runtime in self._runtimes.items():": "for layout, runtime in sorted("
            "self._runtimes.items(), reverse=self.rank == 1):"
        },
    ),
    "a rank captures fewer sizes": Mistake(
        "order",
        "pat_vllm.worker.layout_config:layout_config",
        {"pat_config(vllm_config).largest_batch(layout)": "2 if rank == 1 else None"},
    ),
    "capture with another layout's group": Mistake(
        "order",
        _WORKER + "_enter",
        _also("self._activate(runtime)", "install_tp_group(self._base.group)"),
    ),
}

NIGHTLY = {
    *(f"experts ep, {check}" for check in ("replays", "own graphs", "addresses", "shared")),
    "V1, order",
    "graphs for the longest drafts only",
    "drafts of length 0 are looked for",
    "a switch allocates the KV cache",
    "buffers wake up elsewhere",
    "a switch takes the other layout's graphs along",
    "graphs end with their layout",
    "capture before the weights are there",
    "a switch moves the slot mapping",
}
"""Checks and mistakes that are like others."""
