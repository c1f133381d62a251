"""Gated DeltaNet in torch, token by token and in float32, for plain weights. Test support only.

vLLM's kernels for CPU take the convolution's weights packed, and 16 bits only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softplus
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op


def forward(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Run a layer, a `QwenGatedDeltaNetAttention`, in place of its `forward_cpu`.

    Args:
        hidden_states: `[tokens, hidden]`.
    """
    mixed_qkvz, _ = layer.in_proj_qkvz(hidden_states)
    ba, _ = layer.in_proj_ba(hidden_states)
    if layer.gqa_interleaved_layout:
        *qkv, z, b, a = layer.fix_query_key_value_ordering(mixed_qkvz, ba)
        mixed_qkv = torch.cat([part.flatten(1) for part in qkv], dim=-1)
    else:
        z_size = layer.value_dim // layer.tp_size
        mixed_qkv, z = mixed_qkvz.split([mixed_qkvz.shape[-1] - z_size, z_size], dim=-1)
        z = z.unflatten(-1, (-1, layer.head_v_dim))
        b, a = ba.chunk(2, dim=-1)
    heads = layer.num_v_heads // layer.tp_size
    out = hidden_states.new_zeros(len(hidden_states), heads, layer.head_v_dim)
    torch.ops.vllm.pat_delta_net(mixed_qkv, b, a, out, layer.prefix)
    return layer._output_projection(out, z)  # type: ignore[no-any-return]


def _core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, name: str
) -> None:
    """Fills `out` and the states of the step's requests.

    Args:
        mixed_qkv: `[tokens, queries + keys + values]`.
        b, a: `[tokens, value heads]`.
        out: `[tokens, value heads, value]`.
        name: of the layer.
    """
    context: Any = get_forward_context()
    if context.attn_metadata is None:
        return
    layer, metadata = context.no_compile_layers[name], context.attn_metadata[name]
    decay = torch.exp(-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float()))
    beta, mixed_qkv = b.float().sigmoid(), mixed_qkv.float()
    if metadata.spec_sequence_masks is None:
        _go_on(layer, metadata, mixed_qkv, decay, beta, out)
        return
    of_drafts, others = metadata.spec_token_indx.long(), metadata.non_spec_token_indx.long()
    for tokens, run in ((of_drafts, _verify), (others, _go_on)):
        if len(tokens):
            own = out[tokens]
            run(layer, metadata, mixed_qkv[tokens], decay[tokens], beta[tokens], own)
            out[tokens] = own


def _go_on(
    layer: Any,
    metadata: Any,
    mixed_qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run the sequences that verify no drafts, as `_core` does all; `decay` and `beta` in the place
    of `a` and `b`."""
    convs, states = layer.kv_cache
    convs = convs[:, : layer.conv1d.weight.shape[-1] - 1]  # the rest is for drafts
    slots, decodes = metadata.non_spec_state_indices_tensor.long(), metadata.num_decodes
    if decodes:
        own = slots[:decodes]
        seen = torch.cat([convs[own].float(), mixed_qkv[:decodes, None]], dim=1)
        convs[own] = seen[:, 1:].to(convs.dtype)
        q, k, v = _heads(layer, seen.transpose(1, 2))
        state, o = _step(states[own].float(), q, k, v, decay[:decodes], beta[:decodes])
        states[own], out[:decodes] = state.to(states.dtype), o.to(out.dtype)
    starts = metadata.non_spec_query_start_loc.tolist()
    continued = metadata.has_initial_state.tolist() if metadata.num_prefills else []
    for i in range(decodes, decodes + metadata.num_prefills):
        slot, start, end = slots[i], starts[i], starts[i + 1]
        # A slot that is new may hold anything, also what is no number: it is not read.
        begin = torch.Tensor.float if continued[i] else _zeros
        conv, state = begin(convs[slot]), begin(states[slot])
        seen = torch.cat([conv, mixed_qkv[start:end]])
        convs[slot] = seen[end - start :].to(convs.dtype)
        q, k, v = _heads(layer, seen.unfold(0, len(conv) + 1, 1))
        for t in range(end - start):
            at = start + t
            state, o = _step(state, q[t], k[t], v[t], decay[at], beta[at])
            out[at] = o.to(out.dtype)
        states[slot] = state.to(states.dtype)


def _verify(
    layer: Any,
    metadata: Any,
    mixed_qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run the sequences that verify drafts, as `_go_on` does the others.

    A sequence goes on from the state of the last token that it accepted in the step before. The
    state of each token of this step comes into a slot of its own, and the tokens that the
    convolution saw into the first slot.
    """
    convs, states = layer.kv_cache
    before = layer.conv1d.weight.shape[-1] - 1
    starts = metadata.spec_query_start_loc.tolist()
    for i in range(metadata.num_spec_decodes):
        slots, start, end = metadata.spec_state_indices_tensor[i].long(), starts[i], starts[i + 1]
        refused_after = int(metadata.num_accepted_tokens[i]) - 1
        window = convs[slots[0], refused_after : refused_after + before].float()
        seen = torch.cat([window, mixed_qkv[start:end]])
        convs[slots[0], : len(seen) - 1] = seen[1:].to(convs.dtype)
        q, k, v = _heads(layer, seen.unfold(0, before + 1, 1))
        state = states[slots[refused_after]].float()
        for t in range(end - start):
            at = start + t
            state, o = _step(state, q[t], k[t], v[t], decay[at], beta[at])
            states[slots[t]], out[at] = state.to(states.dtype), o.to(out.dtype)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.float32)


def _heads(layer: Any, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the convolution makes of tokens: q, k and v, `[tokens, value heads, head]`.

    Args:
        windows: what it sees for each, `[tokens, queries + keys + values, kernel]`.
    """
    x = silu((windows * layer.conv1d.weight.float().squeeze(1)).sum(-1))
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    q, k, v = x.split([keys, keys, values], dim=-1)
    q, k = (_unit(tensor.unflatten(-1, (-1, layer.head_k_dim))) for tensor in (q, k))
    each = layer.num_v_heads // layer.num_k_heads
    q, k = (tensor.repeat_interleave(each, dim=1) for tensor in (q, k))
    return q * layer.head_k_dim**-0.5, k, v.unflatten(-1, (-1, layer.head_v_dim))


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state after a token, and what it says, of one sequence or of several.

    Args:
        state: `[..., value heads, value, key]`; of `q`, `k` and `v` the last is one head's, of
            `decay` and `beta` the heads.
    """
    state = state * decay[..., None, None]
    error = (v - torch.einsum("...vk,...k->...v", state, k)) * beta[..., None]
    state = state + error[..., :, None] * k[..., None, :]
    return state, torch.einsum("...vk,...k->...v", state, q)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


direct_register_custom_op("pat_delta_net", _core, mutates_args=["out"])
