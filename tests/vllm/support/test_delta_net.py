"""Gated DeltaNet in plain torch is what vLLM's own kernels for CPU compute, which take 16 bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import (
    _cpu_gdn_attention_nonspec,
    _cpu_gdn_attention_spec_aware,
)

from tests.support.plain_weights import plain_weights  # noqa: F401  # puts `delta_net` on the path

import delta_net  # isort: skip

KEYS, VALUES, WIDTH, KERNEL, SLOTS, DRAFTS = 2, 4, 64, 4, 9, 2
COLUMNS = (2 * KEYS + VALUES) * WIDTH


def layer(packed: bool, drafts: int = 0) -> Any:
    """As vLLM's, on one rank; slots hold what others have left in them."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weight = drawn(COLUMNS, 1, KERNEL, scale=0.5).bfloat16()
    attention = SimpleNamespace(
        prefix="layer",
        tp_size=1,
        num_k_heads=KEYS,
        num_v_heads=VALUES,
        head_k_dim=WIDTH,
        head_v_dim=WIDTH,
        key_dim=KEYS * WIDTH,
        value_dim=VALUES * WIDTH,
        activation="silu",
        A_log=drawn(VALUES, scale=0.5) - 3,
        dt_bias=drawn(VALUES).bfloat16(),
        kv_cache=(
            drawn(SLOTS, KERNEL - 1 + drafts, COLUMNS).bfloat16(),
            drawn(SLOTS, VALUES, WIDTH, WIDTH),
        ),
    )
    plain = weight.squeeze(1)
    if packed and torch.cpu._is_avx512_bf16_supported():
        weight = ops.causal_conv1d_weight_pack(weight.squeeze(1).contiguous())
    attention.conv1d = SimpleNamespace(weight=weight, bias=None, _cpu_unpacked_conv_weight=plain)
    rearrange: Any = QwenGatedDeltaNetAttention.rearrange_mixed_qkv
    attention.rearrange_mixed_qkv = lambda x: rearrange(attention, x)
    return attention


def step(lengths: list[int], goes_on: list[bool], decodes: int = 0) -> Any:
    """vLLM's metadata of sequences in the slots 4, 1, 2; the first `decodes` have one token."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return SimpleNamespace(
        num_actual_tokens=sum(lengths),
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefills=len(lengths) - decodes,
        num_prefill_tokens=sum(lengths[decodes:]),
        non_spec_state_indices_tensor=torch.tensor([4, 1, 2][: len(lengths)], dtype=torch.int32),
        non_spec_query_start_loc=starts.to(torch.int32),
        has_initial_state=torch.tensor(goes_on) if decodes < len(lengths) else None,
        spec_sequence_masks=None,
        num_accepted_tokens=None,
    )


def verification(accepted: list[int], others: list[int]) -> Any:
    """vLLM's metadata of a step that verifies two drafts of each of the first sequences of `step`,
    which accepted so many tokens in the step before, and begins others in the slot 8."""
    count, tokens = len(accepted), (1 + DRAFTS) * len(accepted)
    index = torch.arange(tokens + sum(others))
    metadata = step(others, [False] * len(others))
    metadata.non_spec_state_indices_tensor = torch.tensor([8][: len(others)], dtype=torch.int32)
    more = dict(
        num_actual_tokens=len(index),
        num_spec_decodes=count,
        spec_sequence_masks=torch.ones(count, dtype=torch.bool),
        spec_token_indx=index[:tokens],
        non_spec_token_indx=index[tokens:],
        spec_query_start_loc=torch.arange(0, tokens + 1, 1 + DRAFTS, dtype=torch.int32),
        spec_state_indices_tensor=torch.tensor([[4, 3, 5], [1, 6, 7]], dtype=torch.int32)[:count],
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
        prefill_state_indices=metadata.non_spec_state_indices_tensor,
        prefill_query_start_loc=metadata.non_spec_query_start_loc,
    )
    vars(metadata).update(more)
    return metadata


def test_plain_torch_computes_what_vllms_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """New prompts, parts of prompts after others, decoding, and these together."""
    plain, own = layer(packed=False), layer(packed=True)
    for state in plain.kv_cache:  # memory that nobody has written may hold anything
        state[[4, 1, 2]] = torch.nan
    generator = torch.Generator().manual_seed(1)
    steps = [
        step([70, 5], [False, False]),
        step([3, 40, 9], [True, True, False]),
        step([1, 1, 1], [True] * 3, decodes=3),
        step([1, 1, 30], [True] * 3, decodes=2),
    ]
    for metadata in steps:
        compare(own, plain, metadata, generator, monkeypatch)
    for slot in (0, 3, 5):
        untouched = layer(packed=False).kv_cache
        assert all(
            map(
                torch.equal,
                (state[slot] for state in plain.kv_cache),
                (state[slot] for state in untouched),
            )
        )


def test_verifying_drafts_is_what_vllms_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """After prompts; any of a step's tokens may be the last that was accepted, also beside a new
    prompt and before a step without drafts, where the first was."""
    plain, own = layer(False, DRAFTS), layer(True, DRAFTS)
    generator = torch.Generator().manual_seed(2)
    steps = [
        step([20, 2], [False, False]),
        verification([1, 1], []),
        verification([3, 2], []),
        verification([2, 1], [7]),
        verification([1, 3], []),
        step([1, 1], [True] * 2, decodes=2),
    ]
    for metadata in steps:
        compare(own, plain, metadata, generator, monkeypatch)


def compare(
    own: Any,
    plain: Any,
    metadata: Any,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step by vLLM's kernels and by plain torch, each with its own states."""
    tokens = metadata.num_actual_tokens
    mixed = torch.randn(tokens, COLUMNS, generator=generator).bfloat16()
    b, a = (torch.randn(tokens, VALUES, generator=generator).bfloat16() for _ in range(2))
    out, expected = (torch.zeros(tokens, VALUES, WIDTH, dtype=mixed.dtype) for _ in range(2))
    rows = own.kv_cache[0].shape[1]
    if rows == KERNEL - 1:
        _cpu_gdn_attention_nonspec(own, metadata, mixed, b, a, expected)
    else:
        _cpu_gdn_attention_spec_aware(own, metadata, mixed, b, a, expected, KERNEL, rows)
    context = SimpleNamespace(attn_metadata={"layer": metadata}, no_compile_layers={"layer": plain})
    monkeypatch.setattr(delta_net, "get_forward_context", lambda: context)
    delta_net._core(mixed, b, a, out, "layer")
    apart = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
    print(f"{tokens} tokens: {apart:.2e} apart")
    assert apart < 0.02
