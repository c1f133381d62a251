"""After a step that verified drafts, the state of the last accepted token comes to its place."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from pat_vllm.worker import linear_states

BLOCK, DRAFTS, BEFORE = 8, 3, 3
"""Tokens of a block, the most drafts, and the inputs that the convolution sees before a token's."""
ROWS, BLOCKS, LAYERS = 6, 200, ("a", "b")


class Stepped:
    """A runner whose requests have had a step, and what each has by vLLM's rules.

    A matrix is the number of tokens that it has seen, and 1000 times the request's; an input is its
    token's place, and the same.
    """

    def __init__(self, caching: bool, seed: int) -> None:
        rng = random.Random(seed)
        blocks = rng.sample(range(1, BLOCKS), BLOCKS - 1)
        columns = 64 // BLOCK + DRAFTS if caching else 1 + DRAFTS
        self.table = torch.tensor([[blocks.pop() for _ in range(columns)] for _ in range(ROWS)])
        self.rows = {f"r{i}": row for i, row in enumerate(rng.sample(range(ROWS), 4))}
        self.computed = torch.zeros(ROWS, dtype=torch.int32)
        self.accepted, self.first = torch.ones_like(self.computed), torch.zeros_like(self.computed)
        self.states = {
            name: (torch.full((BLOCKS, BEFORE + DRAFTS, 2), -1.0), torch.full((BLOCKS, 2), -1.0))
            for name in LAYERS
        }
        for row in self.rows.values():
            before, tokens = rng.randint(4, 50), rng.randint(1, 1 + DRAFTS)
            self.accepted[row] = rng.randint(1, tokens)
            self.computed[row] = before + self.accepted[row]
            # In vLLM's step, of the block of the last token, whether it is accepted or not.
            first = (before + tokens - 1) // BLOCK if caching else 0
            self.first[row] = first
            for inputs, matrices in self.states.values():
                seen = torch.arange(before - BEFORE + 1, before + tokens) + 1000 * row
                inputs[self.table[row, first], : len(seen)] = seen[:, None].float()
                for t in range(tokens):
                    matrices[self.table[row, first + t]] = 1000 * row + before + t + 1
        spec = MambaSpec(
            block_size=BLOCK,
            shapes=((BEFORE + DRAFTS, 2), (2,)),
            dtypes=(torch.float32, torch.float32),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="align" if caching else "none",
            num_speculative_blocks=DRAFTS,
        )
        attention = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        groups = [
            SimpleNamespace(kv_cache_spec=attention, layer_names=["attention"]),
            SimpleNamespace(kv_cache_spec=spec, layer_names=[*LAYERS]),
        ]
        layers = {name: SimpleNamespace(kv_cache=pair) for name, pair in self.states.items()}
        states = object.__new__(MambaHybridModelState)
        states.num_accepted_tokens_gpu = self.accepted
        if caching:
            states._mamba_state_idx_gpu = self.first
        self.runner: Any = SimpleNamespace(
            device=torch.device("cpu"),
            speculative_config=object(),
            model_state=states,
            req_states=SimpleNamespace(
                req_id_to_index=self.rows, num_computed_tokens=SimpleNamespace(gpu=self.computed)
            ),
            block_tables=SimpleNamespace(
                block_tables=[
                    SimpleNamespace(gpu=torch.zeros_like(self.table)),
                    SimpleNamespace(gpu=self.table.int()),
                ]
            ),
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
            vllm_config=SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context=layers)
            ),
        )


@given(st.booleans(), st.integers(0, 1 << 16), st.sampled_from([1, 1 << 20]))
def test_a_state_is_that_of_the_last_accepted_token(caching: bool, seed: int, copied: int) -> None:
    """Where a runner that knows of no drafts looks for it. What others have stays as it was."""
    stepped = Stepped(caching, seed)
    asked = ["r1", "of another replica", "r0", "r3"]
    before = {name: [t.clone() for t in pair] for name, pair in stepped.states.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_states, "_COPIED", copied)
        linear_states.settle(stepped.runner, asked)
    written = []
    for row in (stepped.rows[name] for name in asked if name in stepped.rows):
        computed = int(stepped.computed[row])
        written.append(stepped.table[row, (computed - 1) // BLOCK if caching else 0])
        for inputs, matrices in stepped.states.values():
            assert (matrices[written[-1]] == 1000 * row + computed).all()
            seen = torch.arange(computed - BEFORE, computed) + 1000 * row
            assert torch.equal(inputs[written[-1], :BEFORE, 0], seen.float())
    untouched = [block for block in range(BLOCKS) if block not in written]
    for name, pair in stepped.states.items():
        for tensor, old in zip(pair, before[name], strict=True):
            assert torch.equal(tensor[untouched], old[untouched])


def test_what_has_such_slots() -> None:
    runner = Stepped(True, 0).runner
    assert linear_states.has_slots_for_drafts(runner)
    without_drafts = SimpleNamespace(**vars(runner) | {"speculative_config": None})
    without_states = SimpleNamespace(**vars(runner) | {"model_state": object()})
    assert not linear_states.has_slots_for_drafts(without_drafts)
    assert not linear_states.has_slots_for_drafts(without_states)
