"""What Triton makes of PAT's kernels for GPUs, for the KV caches and weights of real models.

Launches are PAT's own, with views that vLLM and PAT make. Code is compiled for compute capability
8.0, 9.0 and 10.0 with `ptxas`, and what it is made of is read from the machine code. The kernels
run in Triton's interpreter, beyond 2^31 words (`sparse_kernels.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pat_vllm.kernels import kv, suffix_match, swap
from pat_vllm.kv_transfer.exchange import _words
from pat_vllm.kv_transfer.kv_buffer import SharedKVBuffer
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import LinearAttention
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.worker.layout_config import KV_LAYOUTS, layout_kv_cache_config
from tests.gpuless.planning import planning
from tests.support.kinds import full
from tests.vllm.kernels.triton_kernels import (
    CAPABILITIES,
    Code,
    compiled_for,
    in_interpreter,
    needs_triton,
)

pytestmark = needs_triton

LLAMA_8B, QWEN_14B = (ModelSize.of(MODEL_SHAPES[name]) for name in ("llama-3.1-8b", "qwen3-14b"))
QWEN_32B = dataclasses.replace(QWEN_14B, layers=64, hidden=5120, heads=64, intermediate=25600)
ODD = dataclasses.replace(LLAMA_8B, hidden=2560, head_dim=80)
"""80 elements in a head."""
MODELS = (LLAMA_8B, QWEN_14B, QWEN_32B)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = 8
NUM_LAYERS, NUM_BLOCKS = 3, 4
THREADS = 4 * 32
MOST_REGISTERS = 64
"""Of a thread; with so many, 1024 threads fit in a multiprocessor."""


def layer_views(
    model: ModelSize, dtype: torch.dtype, kv_layout: str, block_size: int, sizes: tuple[int, ...]
) -> Iterator[torch.Tensor]:
    """Views of all layers in the layouts of these tps, as the exchange gets them."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=model.kv_heads, head_size=model.head_dim, dtype=dtype
    )
    engine = VllmConfig()
    engine.cache_config.kv_cache_layout = kv_layout
    names = [f"layers.{i}" for i in range(NUM_LAYERS)]
    num_bytes = spec.page_size_bytes * NUM_LAYERS * NUM_BLOCKS
    groups = [KVCacheGroupSpec(names, spec)]
    base: KVCacheConfig = planning.get_kv_cache_config_from_groups(engine, groups, num_bytes)
    base.kv_cache_layout = kv_layout
    buffer = SharedKVBuffer()
    buffer.buffer = torch.zeros(num_bytes, dtype=torch.int8)
    for layout in (Layout.of(tp, RANKS) for tp in sizes):
        config = layout_kv_cache_config(base, layout, Layout.of(1, RANKS), full(model.kv_heads))
        for view in buffer.views(config, KVCacheLayout[kv_layout]).values():
            yield _words(view)


def pack_and_unpack(view: torch.Tensor) -> None:
    """Launch both kernels, for some heads of some blocks."""
    heads = view.shape[1]
    pieces: list[list[kv.Piece]] = [[((2, 0), range(heads // 2, heads))], [((1,), range(heads))]]
    blocks = kv.TableBlocks(pieces, view)
    staged = torch.empty(sum(blocks.counts), dtype=torch.int64)
    blocks.pack(view, staged)
    blocks.unpack(staged.split(blocks.counts), view)


def kv_code(
    capability: int,
    models: tuple[ModelSize, ...] = MODELS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    block_sizes: tuple[int, ...] = (16,),
    sizes: tuple[int, ...] = (1, 2, 4, 8),
) -> list[Code]:
    """Of all launches that KV caches need, in the layouts of these tps."""
    with compiled_for(capability) as kernels:
        for case in itertools.product(models, dtypes, KV_LAYOUTS, block_sizes):
            for view in layer_views(*case, sizes):
                pack_and_unpack(view)
    return list(kernels.values())


def slot_code(capability: int) -> list[Code]:
    """Of all launches that slots of Qwen3-Next need, with all key heads on a rank and with two."""
    with compiled_for(capability) as kernels:
        for tp in (1, 8):
            shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4)
            spec = MambaSpec(block_size=16, shapes=shapes, dtypes=(torch.bfloat16, torch.float32))
            pages = torch.zeros(NUM_BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)
            for segment in LinearAttention.segments(spec, pages):
                pack_and_unpack(_words(segment))
    return list(kernels.values())


def swap_code(capability: int) -> list[Code]:
    """Of swaps of rows in the widest and the narrowest weights; all go through the kernel."""
    with compiled_for(capability) as kernels, pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "_on_gpu", lambda tensor: True)
        for model in MODELS:
            for dtype in DTYPES:
                for width in (model.hidden, 1):
                    weight = torch.empty(2 * model.head_dim, width, dtype=dtype)
                    rows = swap.RowSwap(weight, 0, model.head_dim, model.head_dim // 2)
                    prepared = swap.prepare([[rows]])
                    assert all(isinstance(step, swap._KernelRound) for step in prepared._steps)
                    prepared.run()
    return list(kernels.values())


def check(codes: list[Code]) -> None:
    """Everything is in registers, of which enough are left for other threads. Bytes are moved 16 at
    a time; what is read beside them are entries of tables."""
    assert codes
    for code in codes:
        assert code.local_bytes == code.spills == 0, code
        assert code.registers <= MOST_REGISTERS, code
        assert set(code.stores) == {128}, code
        wide = [bits for bits in code.loads if bits == 128]
        # Each thread has its share of a tile in flight, in one direction or in both.
        tile_bits = 1024 * 64 * (2 if code.kernel == "swap_kernel" else 1)
        share = tile_bits // (THREADS * 128)
        assert len(code.stores) == len(wide) and len(wide) % share == 0, code
        assert set(code.loads) <= {64, 128} and len(code.loads) - len(wide) <= 4, code


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kv_kernels(capability: int, block_size: int) -> None:
    check(kv_code(capability, block_sizes=(block_size,)))


def test_kv_kernels_of_odd_heads() -> None:
    check(kv_code(90, (ODD,), (torch.bfloat16,), sizes=(1, 8)))


def test_slots_of_linear_attention() -> None:
    """Rows of the convolution, of which a head has a part, and matrices."""
    check(slot_code(90))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_swaps_of_all_models(capability: int) -> None:
    codes = swap_code(capability)
    assert len(codes) == 1, "one kernel serves all weights"
    check(codes)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_drafters(capability: int) -> None:
    """One code for all lengths of texts. Neighbouring threads read neighbouring places: no access
    of more than a token for each."""
    with compiled_for(capability) as kernels:
        for states, longest, longest_other in ((1, 512, 0), (256, 32768, 1 << 17)):
            tokens = torch.empty(states, longest, dtype=torch.int32)
            blocks = suffix_match.score_blocks(longest, longest_other)
            suffix_match.draft(
                tokens,
                states=torch.zeros(states, dtype=torch.int32),
                lengths=torch.zeros(states, dtype=torch.int32),
                sampled=torch.zeros(states, dtype=torch.int32),
                last_sampled=torch.zeros(states, dtype=torch.int64),
                others=torch.zeros(states, 2, dtype=torch.int64),
                longest_other=longest_other,
                scores=torch.zeros(states, blocks, dtype=torch.int64),
                drafts=torch.zeros(states, 8, dtype=torch.int64),
                shortest=2,
            )
    assert sorted(code.kernel for code in kernels.values()) == ["draft_kernel", "score_kernel"]
    for code in kernels.values():
        assert code.local_bytes == code.spills == 0, code
        assert code.registers <= MOST_REGISTERS, code


def test_beyond_2_31_words() -> None:
    printed = in_interpreter("tests.gpuless.sparse_kernels")
    assert json.loads(printed.splitlines()[-1]) == ["LBHNC", "LBNHC", "swap"]
