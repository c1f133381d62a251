"""What PAT does to linear attention of vLLM's models, in the workers."""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def keep_plain_linear_attention(layer: Any) -> None:
    """Have vLLM run a layer of Gated DeltaNet on CPU with the weights as they were loaded.

    Without it: vLLM's kernels for CPU take the convolution's weights packed, and 16 bits only.
    Missing seam: an option of the CPU platform.
    """
    layer._forward_method = MethodType(_plain_forward(), layer)


@functools.cache
def _plain_forward() -> Any:
    import torch
    from torch.nn.functional import silu, softplus
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import direct_register_custom_op

    def core(
        mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, name: str
    ) -> None:
        """The recurrence of Gated DeltaNet, token by token, in float32.

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
        starts = metadata.non_spec_query_start_loc.tolist()
        slots = metadata.non_spec_state_indices_tensor.tolist()
        first = metadata.num_decodes
        count = first + metadata.num_prefills
        fresh = [] if not metadata.num_prefills else (~metadata.has_initial_state).tolist()
        conv_states, states = layer.kv_cache
        keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
        weight = layer.conv1d.weight.float().squeeze(1)
        decay = torch.exp(-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float()))
        beta = b.float().sigmoid()
        for i, (slot, start, end) in enumerate(zip(slots[:count], starts, starts[1:], strict=False)):
            if start == end:
                continue
            begins = i >= first and fresh[i]
            window, state = conv_states[slot].float(), states[slot].float()
            if begins:
                window, state = torch.zeros_like(window), torch.zeros_like(state)
            x = torch.cat([window, mixed_qkv[start:end].float()])
            conv_states[slot] = x[end - start :].to(conv_states.dtype)
            x = silu((x.unfold(0, weight.shape[1], 1) * weight).sum(-1))
            q, k, v = x.split([keys, keys, values], dim=-1)
            q, k = (_unit(one.unflatten(-1, (-1, layer.head_k_dim))) for one in (q, k))
            each = layer.num_v_heads // layer.num_k_heads
            q = q.repeat_interleave(each, dim=1) * layer.head_k_dim**-0.5
            k = k.repeat_interleave(each, dim=1)
            v = v.unflatten(-1, (-1, layer.head_v_dim))
            for t in range(end - start):
                state = state * decay[start + t, :, None, None]
                error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
                error = error * beta[start + t, :, None]
                state = state + torch.einsum("hv,hk->hvk", error, k[t])
                out[start + t] = torch.einsum("hvk,hk->hv", state, q[t]).to(out.dtype)
            states[slot] = state.to(states.dtype)

    def _unit(x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    direct_register_custom_op("pat_plain_linear_attention", core, mutates_args=["out"])

    def forward(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """As vLLM's for CPU, with this core."""
        mixed_qkvz, _ = layer.in_proj_qkvz(hidden_states)
        ba, _ = layer.in_proj_ba(hidden_states)
        if layer.gqa_interleaved_layout:
            *qkv, z, b, a = layer.fix_query_key_value_ordering(mixed_qkvz, ba)
            mixed_qkv = torch.cat([one.flatten(1) for one in qkv], dim=-1)
        else:
            z_size = layer.value_dim // layer.tp_size
            mixed_qkv, z = mixed_qkvz.split([mixed_qkvz.shape[-1] - z_size, z_size], dim=-1)
            z = z.reshape(z.size(0), -1, layer.head_v_dim)
            b, a = ba.chunk(2, dim=-1)
        heads = layer.num_v_heads // layer.tp_size
        out = hidden_states.new_zeros(len(hidden_states), heads, layer.head_v_dim)
        torch.ops.vllm.pat_plain_linear_attention(mixed_qkv, b, a, out, layer.prefix)
        return layer._output_projection(out, z)

    return forward
