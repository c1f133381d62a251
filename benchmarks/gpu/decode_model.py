"""One rank's shard of a decoder, as far as a decode step computes with it.

The matrices have the sizes that vLLM's layers have at that tensor parallelism, and random values.
Where ranks would communicate nothing happens: results are of no use but to be timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch.nn import functional as F

from benchmarks.gpu import torch_ops
from benchmarks.gpu.kv_blocks import BLOCK
from benchmarks.gpu.shapes import ModelShape
from pat_vllm.layout import Layout

_EPS = 1e-6
_VOCAB_PADDING = 64


def ops_for(device: torch.device) -> ModuleType:
    """What is between the matrix products: `torch_ops`, or the same as Triton kernels."""
    if device.type == "cpu":
        return torch_ops
    from benchmarks.gpu import triton_ops

    return triton_ops


@dataclass
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    head_norms: torch.Tensor | None
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class DecodeShard:
    """The weights of one rank.

    Args:
        strided: row-parallel matrices are columns of the whole ones, as they are after a reshard
            in place, rather than tensors of their own.

    Attributes:
        num_bytes: weights that a step reads.
        kv_heads: that a rank stores.
        token_bytes: KV of a token on the rank, over all layers.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: int,
        device: torch.device,
        positions: int,
        strided: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.kv_heads = Layout.of(tp, tp).kv_heads_per_rank(shape.kv_heads)
        self.token_bytes = 2 * shape.layers * self.kv_heads * shape.head_dim * dtype.itemsize
        self._strided = strided
        self._tp = tp
        self._heads = shape.heads // tp
        attention = self._heads * shape.head_dim
        norms = (2, shape.head_dim) if shape.qk_norm else None
        self._layers = [
            _Layer(
                input_norm=self._random(shape.hidden),
                qkv=self._random(attention + 2 * self.kv_heads * shape.head_dim, shape.hidden),
                head_norms=self._random(*norms) if norms else None,
                out=self._row_parallel(attention),
                post_norm=self._random(shape.hidden),
                gate_up=self._random(2 * shape.intermediate // tp, shape.hidden),
                down=self._row_parallel(shape.intermediate // tp),
            )
            for _ in range(shape.layers)
        ]
        padded = -(-shape.vocab // _VOCAB_PADDING) * _VOCAB_PADDING
        self._embedding = self._random(padded // tp, shape.hidden)
        self._norm = self._random(shape.hidden)
        self._head = self._random(padded // tp, shape.hidden)
        self._rotary = _rotary(shape.head_dim, positions, device)
        matrices = [m for x in self._layers for m in (x.qkv, x.out, x.gate_up, x.down)]
        self.num_bytes = sum(m.numel() * m.element_size() for m in [*matrices, self._head])

    def _random(self, *size: int) -> torch.Tensor:
        # Scaled so that activations neither vanish nor overflow over the layers.
        scale = size[-1] ** -0.5 if len(size) > 1 else 1.0
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(std=scale)

    def _row_parallel(self, columns: int) -> torch.Tensor:
        if not self._strided:
            return self._random(self.shape.hidden, columns)
        whole = self._random(self.shape.hidden, columns * self._tp)
        return whole[:, (self._tp - 1) * columns :]

    def new_cache(self, num_bytes: int) -> torch.Tensor:
        """Random KV in `num_bytes` or less: [layers, blocks, KV heads, tokens, 2, head_dim]."""
        blocks = num_bytes // (BLOCK * self.token_bytes)
        size = (self.shape.layers, blocks, self.kv_heads, BLOCK, 2, self.shape.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_()

    def new_tokens(self, batch: int) -> torch.Tensor:
        """Random tokens of the rank's part of the vocabulary."""
        return torch.randint(len(self._embedding), (batch,), device=self.device)

    def logits(
        self,
        tokens: torch.Tensor,
        cache: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        ops: ModuleType,
    ) -> torch.Tensor:
        """A decode step up to this rank's logits, [batch, padded vocabulary / tp].

        Args:
            tokens: int64 [batch], the last token of each sequence, within the rank's vocabulary.
            tables: block ids of each sequence, int32 [batch, blocks].
            lengths: int32 [batch], the last token included.
        """
        residual = F.embedding(tokens, self._embedding)
        x = torch.zeros_like(residual)
        width = self._heads * self.shape.head_dim
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            x = ops.add_rms_norm(x, residual, layer.input_norm, _EPS)
            qkv = F.linear(x, layer.qkv)
            ops.rotate_and_cache(
                qkv, layer_cache, tables, lengths, self._rotary, layer.head_norms, _EPS
            )
            attended = ops.attention(qkv, layer_cache, tables, lengths)
            assert attended.shape[1] == width
            x = F.linear(attended, layer.out)
            x = ops.add_rms_norm(x, residual, layer.post_norm, _EPS)
            x = F.linear(ops.silu_mul(F.linear(x, layer.gate_up)), layer.down)
        x = ops.add_rms_norm(x, residual, self._norm, _EPS)
        return F.linear(x, self._head)

    def sample(self, logits: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        """Sample a token of each sequence at temperature 1, as every rank of a group does.

        Args:
            gathered: [batch, padded vocabulary], with the other ranks' logits; this rank's are put
                in.
        """
        gathered[:, : logits.shape[1]] = logits
        chances = gathered.float().softmax(dim=-1)
        # The largest of chance / exponential is a sample: no wait for the device.
        return chances.div_(torch.empty_like(chances).exponential_()).argmax(dim=-1)

    def new_gathered(self, batch: int) -> torch.Tensor:
        """The logits of all ranks, for `sample`."""
        size = batch, self._head.shape[0] * self._tp
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_()


def _rotary(head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines, float32 [positions, head_dim]."""
    rates = 1e4 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(positions, device=device)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()
