"""Mamba2's drafts are verified in torch as vLLM's kernels for GPUs do, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import runpy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.v2_on_cpu import mamba2
from tests.support.v2_on_cpu.v2_on_cpu import FOLDER
from tests.vllm.kernels.triton_kernels import in_interpreter, needs_triton

HEADS, GROUPS, VALUE, KEY, KERNEL, DRAFTS, SLOTS = 4, 2, 8, 16, 4, 2, 12
COLUMNS = HEADS * VALUE + 2 * GROUPS * KEY


@needs_triton
def test_drafts_are_verified_as_on_gpus() -> None:
    assert in_interpreter(__name__).split()[-1] == "equal"


def of_gpus(name: str) -> Any:
    """A copy of a module of vLLM's, with its kernels for GPUs."""
    from vllm.platforms import current_platform

    spec = importlib.util.find_spec(f"vllm.model_executor.layers.mamba.ops.{name}")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current_platform, "is_cpu", lambda: False, raising=False)
        spec.loader.exec_module(module)
    return module


def main() -> None:
    """Steps of three sequences, of which any token may be the last that was accepted; in the last
    step some have no drafts."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    conv, ssm = of_gpus("causal_conv1d"), of_gpus("mamba_ssm")
    weight, bias = drawn(COLUMNS, KERNEL), drawn(COLUMNS)
    a, d, dt_bias = -drawn(HEADS).exp(), drawn(HEADS), drawn(HEADS)
    of_heads = (HEADS, VALUE)
    wide_a = a[:, None, None].expand(*of_heads, KEY)
    wide_d, wide_bias = d[:, None].expand(of_heads), dt_bias[:, None].expand(of_heads)
    rows = KERNEL - 1 + DRAFTS
    own = drawn(SLOTS, rows, COLUMNS), drawn(SLOTS, HEADS, VALUE, KEY)
    theirs = tuple(state.clone() for state in own)
    slots = torch.tensor([[3, 5, 1], [2, 9, 4], [7, 8, 11]], dtype=torch.int32)
    steps = [([3, 3, 3], [1, 1, 1]), ([3, 2, 3], [3, 1, 2]), ([1, 3, 1], [3, 2, 1])]
    for lengths, accepted in steps:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        tokens, count = sum(lengths), torch.tensor(accepted, dtype=torch.int32)
        x, dt = drawn(tokens, COLUMNS), drawn(tokens, HEADS)
        results = []
        for (convs, states), convolve, update in (
            (own, mamba2.convolve_drafts, mamba2.update_states),
            (theirs, conv.causal_conv1d_update, ssm.selective_state_update),
        ):
            mixed = convolve(
                x.clone(), convs.transpose(-1, -2), weight, bias, "silu",
                conv_state_indices=slots, num_accepted_tokens=count, query_start_loc=starts,
                max_query_len=1 + DRAFTS,
            )  # fmt: skip
            sizes = [HEADS * VALUE, GROUPS * KEY, GROUPS * KEY]
            values, b, c = (part.unflatten(1, (-1, size)) for part, size in zip(
                mixed.split(sizes, dim=1), (VALUE, KEY, KEY), strict=True
            ))  # fmt: skip
            out = torch.empty(tokens, *of_heads)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
                update(
                    states, values, dt[..., None].expand(-1, -1, VALUE), wide_a, b, c, wide_d,
                    wide_bias, dt_softplus=True, state_batch_indices=slots,
                    dst_state_batch_indices=slots, out=out, num_accepted_tokens=count,
                    cu_seqlens=starts,
                )  # fmt: skip
            results.append((mixed, out))
        for ours, of_vllm in zip((*results[0], *own), (*results[1], *theirs), strict=True):
            torch.testing.assert_close(ours, of_vllm)
    print("equal")


if __name__ == "__main__":
    runpy.run_path(str(FOLDER / "sitecustomize.py"))  # before vLLM looks for Triton
    main()
