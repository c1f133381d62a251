"""Mamba2 keeps the state of a request's last token alone, as layouts can share it, and takes none
that has drafts for a prompt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from pat_vllm.layout import Place
from pat_vllm.models.kinds import LinearAttention, class_of
from pat_vllm.patches.linear_attention import end_prompts_parts_with_blocks, prepare_mamba2
from tests.support.models import random_model
from tests.vllm.weights.test_weights import as_rank, build, vllm_config_for


def test_no_state_is_kept_from_within_a_step() -> None:
    """The one that vLLM would keep there takes a block of which no kind knows."""
    with set_current_vllm_config(VllmConfig()):
        config = vllm_config_for(random_model("nemotron_h"), tp=1)
        model = build(config, Place(tp=1, tp_rank=0))
    config.cache_config.mamba_block_size = 64
    layers = [module for module in model.modules() if isinstance(module, MambaMixer2)]
    with as_rank(1, 0):
        stock = [layer.get_kv_cache_spec(config) for layer in layers]
        end_prompts_parts_with_blocks(layers)
        plain = [layer.get_kv_cache_spec(config) for layer in layers]
    none = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}
    assert plain == [replace(spec, **none) for spec in stock if spec is not None]
    assert len(plain) == 4 and plain != stock
    assert {class_of(spec) for spec in plain} == {LinearAttention}
    assert {class_of(spec) for spec in stock} == {None}


DRAFTS = 2
STEP = {"long": 9, "new": 1, "as long as drafts": 1 + DRAFTS}
"""Parts of prompts, and how many tokens they have."""


def prompts_before_decodes(drafts: dict[str, list[int]]) -> int:
    """How many requests that decode vLLM takes for prompts, in any order of a scheduler's that has
    new requests last."""
    decodes = {name: 1 + len(drafts.get(name, ())) for name in ("a", "b", "c")}
    most = 0
    for names in itertools.permutations(STEP):
        tokens = {name: (decodes | STEP)[name] for name in [*decodes, *names]}
        ordered = model_runner.sort_batch_req_ids(tokens, drafts, 1 + DRAFTS)
        assert sorted(ordered) == sorted(tokens)
        lengths = torch.tensor([tokens[name] for name in ordered])
        batch: Any = SimpleNamespace(
            max_query_len=int(lengths.max()),
            num_reqs=len(ordered),
            num_actual_tokens=int(lengths.sum()),
            query_start_loc_cpu=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            is_prefilling=torch.tensor([name in STEP for name in ordered]),
        )
        count, *_ = split_decodes_and_prefills(
            batch, 1 + DRAFTS, treat_short_extends_as_decodes=False
        )
        most = max(most, len(decodes) - count)
    return most


class Unpatched:
    """vLLM as it is, and runners that would be prepared."""

    def __init__(self) -> None:
        self.mixer = object.__new__(MambaMixer2)
        torch.nn.Module.__init__(self.mixer)

    def runner(self, drafts: bool = True, mamba: bool = True, v2: bool = True) -> Any:
        of_v2 = {"req_states": None} if v2 else {}
        model = torch.nn.ModuleList([self.mixer] if mamba else [])
        config = object() if drafts else None
        return SimpleNamespace(speculative_config=config, model=model, **of_v2)


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Unpatched:
    """What is patched here is restored."""
    for owner, name in (
        (model_runner, "sort_batch_req_ids"),
        (BaseMambaAttentionMetadataBuilder, "build_for_cudagraph_capture"),
    ):
        stock = vars(owner)[name]
        monkeypatch.setattr(owner, name, getattr(stock, "__wrapped__", stock))
    return Unpatched()


@pytest.mark.parametrize("drafts", [{}, {"b": [7]}, {"a": [7, 8], "c": [7]}])
def test_requests_that_decode_come_before_prompts(
    drafts: dict[str, list[int]], unpatched: Unpatched
) -> None:
    for other in ({"drafts": False}, {"mamba": False}, {"v2": False}):
        prepare_mamba2(unpatched.runner(**other))
        assert prompts_before_decodes(drafts), "vLLM's own order"
    prepare_mamba2(unpatched.runner())
    assert not prompts_before_decodes(drafts)


def test_graphs_of_fewer_drafts_are_captured(unpatched: Unpatched) -> None:
    """With the lengths that a step has; with more than the most drafts there are none."""
    builder: Any = object.__new__(Mamba2AttentionMetadataBuilder)
    builder.num_spec_tokens, builder.decode_cudagraph_max_bs = DRAFTS, 8
    builder.build = lambda common, metadata, num_accepted_tokens: num_accepted_tokens.tolist()

    def captured(tokens: int, requests: int = 3) -> list[int]:
        starts = tokens * torch.arange(requests + 1)
        step = Step(max_query_len=tokens, num_reqs=requests, query_start_loc=starts)
        got: list[int] = builder.build_for_cudagraph_capture(step)
        return got

    with pytest.raises(AssertionError):
        captured(2)
    prepare_mamba2(unpatched.runner())
    assert [captured(tokens) for tokens in (1, 2, 3)] == [[1] * 3, [2] * 3, [3] * 3]
    with pytest.raises(AssertionError):
        captured(2 + DRAFTS)
    with pytest.raises(AssertionError):
        captured(1, requests=9)


@dataclass(frozen=True)
class Step:
    """vLLM's common metadata, as far as it is looked at here."""

    max_query_len: int
    num_reqs: int
    query_start_loc: torch.Tensor

    def replace(self, **changed: Any) -> Step:
        return replace(self, **changed)
