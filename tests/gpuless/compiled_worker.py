"""A worker extension that says what each layout runs of vLLM's compiled code. Test support only."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from vllm.compilation import decorators
from vllm.compilation.caching import VllmSerializableFunction
from vllm.compilation.counter import compilation_counter
from vllm.compilation.piecewise_backend import PiecewiseBackend

if os.environ.get("PAT_TEST_PLAIN_WEIGHTS"):
    sys.path.append(str(Path(__file__).parents[1] / "support" / "plain_weights"))
    import plain_weights

    plain_weights.apply()


_stock_load = decorators._try_load_aot_compiled_fn


def _load(model: Any, path: str) -> Any:
    model.artifact = path
    return _stock_load(model, path)


decorators._try_load_aot_compiled_fn = _load


class Compiled:
    """Methods for `collective_rpc`."""

    _runtimes: Any

    def compiled(self) -> dict[str, Any]:
        """What vLLM has counted in this process, and each layout's compiled code; fit for JSON."""
        layouts = {str(one.layout): dict(_facts(one)) for one in self._runtimes.values()}
        return {"counter": dataclasses.asdict(compilation_counter), "layouts": layouts}


def _facts(runtime: Any) -> Iterator[tuple[str, Any]]:
    model = runtime.runner.get_model().model
    compilation = runtime.config.compilation_config
    yield "folder", getattr(model, "artifact", compilation.local_cache_dir)
    yield "group", runtime.group.unique_name
    yield "ranges of the config", [str(one) for one in compilation.get_compile_ranges()]
    yield "weights", {_placeholder(name): _form(one) for name, one in model.named_parameters()}
    if (function := getattr(model, "aot_compiled_fn", None)) is None:
        return
    compiled = function._artifacts.compiled_fn
    pieces = [
        one
        for one in compiled.optimized_call.keywords["__vllm_submods__"]
        if isinstance(one, PiecewiseBackend)
    ]
    yield "code", id(compiled)
    yield "ranges", sorted({str(entry) for piece in pieces for entry in piece.range_entries})
    module = _module(compiled)
    inputs = {node.target.lower(): node for node in module.graph.find_nodes(op="placeholder")}
    yield (
        "inputs",
        {
            name: _form(node.meta["example_value"])
            for name, node in inputs.items()
            if "_parameters_" in name
        },
    )
    yield (
        "groups",
        sorted(
            {
                node.kwargs.get("group_name") or node.args[-1]
                for piece in module.modules()
                if isinstance(piece, GraphModule)
                for node in piece.graph.nodes
                if "vllm.all_reduce" in str(node.target)
            }
        ),
    )


def _placeholder(name: str) -> str:
    """The name that Dynamo gives to a parameter of the compiled module."""
    *modules, leaf = name.split(".")
    return f"l_self_modules_{'_modules_'.join(modules)}_parameters_{leaf}_"


def _form(tensor: torch.Tensor) -> list[list[int]]:
    return [list(tensor.shape), list(tensor.stride())]


def _module(compiled: Any) -> GraphModule:
    """What was compiled; of code that was loaded, as it lies in the artifact."""
    module = compiled.graph_module
    if isinstance(module, bytes):
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        fake_mode = FakeTensorMode(shape_env=ShapeEnv())
        module = VllmSerializableFunction.deserialize_graph_module(module, fake_mode)
    return module
