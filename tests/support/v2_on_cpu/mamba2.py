"""Mamba2's kernels in torch where drafts are verified. Test support only.

Those of vLLM's for CPU know no drafts: the convolution sees refused ones, and states come from the
slots of others and go there. What these compute is what vLLM's kernels for GPUs do.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.functional import silu, softplus


def patch(mixer: Any) -> None:
    """Patch `vllm.model_executor.layers.mamba.mamba_mixer2`."""
    of_cpu = mixer.causal_conv1d_update, mixer.selective_state_update

    def convolve(*args: Any, num_accepted_tokens: Any, **options: Any) -> Any:
        if num_accepted_tokens is None:
            return of_cpu[0](*args, num_accepted_tokens=None, **options)
        return convolve_drafts(*args, num_accepted_tokens=num_accepted_tokens, **options)

    def update(*args: Any, num_accepted_tokens: Any, **options: Any) -> None:
        if num_accepted_tokens is None:
            of_cpu[1](*args, num_accepted_tokens=None, **options)
        else:
            update_states(*args, num_accepted_tokens=num_accepted_tokens, **options)

    mixer.causal_conv1d_update, mixer.selective_state_update = convolve, update


def convolve_drafts(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """vLLM's `causal_conv1d_update`: a sequence's first slot has what it saw for all of its tokens.

    Args:
        x: `[tokens, columns]`, overwritten by what is returned.
        conv_state: `[slots, columns, rows]`.
        conv_state_indices: `[sequences, 1 + drafts]`.
    """
    assert activation == "silu"
    before = weight.shape[1] - 1
    for i, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        if start == end:
            continue
        inputs = conv_state[int(conv_state_indices[i, 0])]
        first = int(num_accepted_tokens[i]) - 1
        seen = torch.cat([inputs[:, first : first + before], x[start:end].T], dim=1)
        inputs[:, : seen.shape[1] - 1] = seen[:, 1:]
        windows = seen.unfold(1, before + 1, 1)
        x[start:end] = silu((windows * weight[:, None]).sum(-1) + bias[:, None]).T
    return x


def update_states(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> None:
    """vLLM's `selective_state_update`: a sequence goes on from the slot of the last token that it
    accepted, and the state of each token of this step comes into a slot of its own.

    Args:
        state: `[slots, heads, value, key]`.
        x, dt, out: `[tokens, heads, value]`.
        B, C: `[tokens, groups, key]`.
        state_batch_indices: `[sequences, 1 + drafts]`.
    """
    steps = softplus(dt.float() + dt_bias)
    each = x.shape[1] // B.shape[1]
    keys, queries = (part.float().repeat_interleave(each, dim=1) for part in (B, C))
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        slots = state_batch_indices[i].tolist()
        own = state[slots[int(num_accepted_tokens[i]) - 1]].float()
        for t, slot in zip(range(start, end), slots, strict=False):
            own = own * torch.exp(A * steps[t, ..., None])
            own = own + (steps[t] * x[t])[..., None] * keys[t, :, None]
            state[slot] = own.to(state.dtype)
            out[t] = ((own * queries[t, :, None]).sum(-1) + D * x[t]).to(out.dtype)
