"""What PAT changes in vLLM's drafters and runners, on a runner that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _eagle_step_slot_mapping_metadata_kernel_impl
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from pat_vllm.patches import drafts
from pat_vllm.patches.drafts import prepare_drafter

MOST = 4


class Runner:
    """Model Runner V1 as far as it asks whether it speculates."""

    def __init__(self, method: str = "ngram") -> None:
        self.speculative_config: Any = SimpleNamespace(method=method)
        self.drafter = SimpleNamespace(
            k=MOST, propose=self._propose, _update_positions_dependent_metadata=self._propose
        )
        self.seen: list[tuple[str, bool]] = []
        self.fails = False

    def _propose(self, k: int, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert k == MOST, "the drafter fails at other lengths"
        return torch.arange(2 * MOST).view(2, MOST), torch.tensor([1, MOST])

    def execute_model(self, step: SchedulerOutput) -> None:
        self.seen.append(("execute", self.speculative_config is not None))

    def sample_tokens(self, grammars: Any) -> None:
        self.seen.append(("sample", self.speculative_config is not None))
        if self.fails:
            raise RuntimeError("a sampler's mistake")

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> None:
        raise AssertionError("no step here gets so far")

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return False


def a_step(k: int, drafts: int = 0, tokens: int = 1) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.total_num_scheduled_tokens = tokens
    step.num_spec_tokens_to_schedule = k
    step.scheduled_spec_decode_tokens = {"a": [7] * drafts} if drafts else {}
    return step


def patched(method: str = "ngram") -> Any:
    runner: Any = Runner(method)
    for _ in range(2):
        prepare_drafter(runner)
    return runner


def speculates(runner: Any, step: SchedulerOutput) -> bool:
    """Whether a step asks for the drafter or the rejection sampler, in both its halves."""
    runner.seen.clear()
    runner.execute_model(step)
    runner.sample_tokens(None)
    assert runner.speculative_config is not None
    (_, first), (_, second) = runner.seen
    assert first == second
    return first


def test_steps_without_drafts_are_as_without_a_drafter() -> None:
    """Where nothing is verified nor drafted, and only there."""
    runner = patched()
    assert not speculates(runner, a_step(0))
    assert speculates(runner, a_step(2))
    assert speculates(runner, a_step(0, drafts=2))
    assert speculates(runner, a_step(2, drafts=2))
    assert not speculates(runner, a_step(0))
    runner.execute_model(a_step(0, tokens=0))  # which is not followed by sampling
    assert runner.speculative_config is not None
    runner.fails = True
    with pytest.raises(RuntimeError, match="a sampler's mistake"):
        speculates(runner, a_step(0))
    assert runner.speculative_config is not None


def test_a_drafter_that_keeps_tokens_always_runs_and_with_its_own_length() -> None:
    runner = patched("ngram_gpu")
    assert speculates(runner, a_step(0))
    for length, tokens, counts in (
        (MOST, [[0, 1, 2, 3], [4, 5, 6, 7]], [1, 4]),
        (2, [[0, 1], [4, 5]], [1, 2]),
        (0, [[], []], [0, 0]),
    ):
        drafted, num_valid = runner.drafter.propose(length)
        assert (drafted.tolist(), num_valid.tolist()) == (tokens, counts)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "mtp"])
def test_drafts_near_the_longest_context(method: str) -> None:
    runner = patched(method)
    assert runner._input_fits_in_drafter("some") == (method != "ngram_gpu")
    assert not runner._input_fits_in_drafter(None)


def a_pass(
    positions_1d: torch.Tensor,
    block_table_tensor: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    input_batch_size: int,
) -> None:
    """As vLLM's `eagle_step_update_slot_mapping_and_metadata`, by its kernel for CPUs."""
    tensors = positions_1d, block_table_tensor, None, seq_lens
    out = out_clamped_positions, out_slot_mapping
    _eagle_step_slot_mapping_metadata_kernel_impl(
        *tensors, *out, block_size, max_model_len, None, PADDING_SLOT_ID
    )


def test_passes_beyond_the_longest_context_write_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is far from it, one comes there, one is there."""
    current_platform.import_kernels()
    monkeypatch.setattr(llm_base_proposer, "eagle_step_update_slot_mapping_and_metadata", a_pass)
    runner = patched("mtp")
    block_size, blocks, longest = 4, 4, 14
    proposer: Any = object.__new__(SpecDecodeBaseProposer)
    proposer.uses_mrope, proposer.max_model_len = False, longest
    proposer.positions = torch.zeros(3, dtype=torch.int64)
    proposer._slot_mapping_buffer = torch.zeros(3, dtype=torch.int64)
    runner.drafter = proposer
    prepare_drafter(runner)
    metadata = SimpleNamespace(
        block_table_tensor=torch.arange(3 * blocks, dtype=torch.int32).view(3, blocks),
        seq_lens=torch.tensor([3, 12, 14], dtype=torch.int32),
        seq_lens_cpu_upper_bound=None,
        max_seq_len=longest,
    )
    positions = torch.tensor([2, 11, 13])
    seen = []
    for _ in range(4):
        positions = proposer._update_positions_dependent_metadata(
            positions, metadata, 3, 3, block_size
        )
        assert metadata.seq_lens.max() <= longest
        seen.append((proposer.positions.tolist(), metadata.slot_mapping.tolist()))
    second = blocks * block_size
    assert seen == [
        ([3, 12, 0], [3, second + 12, -1]),
        ([4, 13, 0], [4, second + 13, -1]),
        ([5, 0, 0], [5, -1, -1]),
        ([6, 0, 0], [6, -1, -1]),
    ]


@pytest.mark.parametrize("own", [False, True])
def test_drafters_of_other_layouts_share_as_the_first(own: bool) -> None:
    """Also where no checkpoint has been read, and shards have no values."""
    target = nn.Module()
    target.model = nn.Module()
    target.model.embed_tokens, target.lm_head = nn.Linear(2, 2), nn.Linear(2, 2)
    proposer: Any = object.__new__(SpecDecodeBaseProposer)
    proposer.model = nn.Module()
    proposer.model.model = nn.Module()
    embeddings, head = nn.Linear(2, 2), nn.Linear(2, 2)
    proposer.model.model.embed_tokens, proposer.model.lm_head = embeddings, head
    proposer.model.has_own_embed_tokens = proposer.model.has_own_lm_head = not own
    head.load_state_dict(target.lm_head.state_dict())  # alike, which says nothing
    proposer.vllm_config = SimpleNamespace(speculative_config=None)
    proposer.use_local_argmax_reduction = False
    with (
        pytest.MonkeyPatch.context() as patch,
        drafts.share_with_target(
            {"has_own_embed_tokens": not own, "has_own_lm_head": not own}, use_v2=False
        ),
    ):
        patch.setattr(llm_base_proposer, "get_pp_group", lambda: SimpleNamespace(world_size=1))
        proposer._maybe_share_embeddings(target)
        proposer._maybe_share_lm_head(target)
    assert proposer.model.model.embed_tokens is (embeddings if own else target.model.embed_tokens)
    assert proposer.model.lm_head is (head if own else target.lm_head)
    assert proposer.model.has_own_lm_head == own


def test_drafts_are_verified_by_the_parameters_of_their_requests() -> None:
    """vLLM's own C++ for CPU leaves them unwritten, and fails where there are no drafts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
            patch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
        for _ in range(2):
            drafts.verify_sampled_drafts()
        expand = rejection_sampler.expand_batch_to_tokens
        counts = torch.tensor([2, 2, 5], dtype=torch.int32)
        temperature = expand(torch.tensor([0.5, 9.0, 0.0]), counts, 5, replace_to=1)
        assert temperature.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
        top_k = expand(torch.tensor([7, 8, 9], dtype=torch.int32), counts, 5)
        assert top_k.dtype == torch.int32
        assert top_k.tolist() == [7, 7, 9, 9, 9]
        parameters: Any = SimpleNamespace(
            all_greedy=False, temperature=torch.ones(1), top_k=torch.ones(1), top_p=None
        )
        none = torch.zeros(1, dtype=torch.int32)
        constrained = rejection_sampler.apply_sampling_constraints(
            torch.zeros(0, 16), none, parameters
        )
        assert constrained.shape == (0, 16)
