"""vLLM's rejection sampler on CPU, as PAT has it verify drafts, follows the law of the model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from pat_vllm.patches import drafts
from tests.support.engines import let_vllm_look_at_numba

# vLLM's registry of kernels looks at all that modules hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")

ROWS, DRAFTS, VOCAB = 20_000, 3, 16
KINDS = ((1.0, VOCAB), (1.5, VOCAB), (2.0, 6))
"""Temperature and top-k of requests, in turn; after these comes a greedy one."""
BONUS = VOCAB - 1


@pytest.fixture(autouse=True)
def sampler_of_cpu() -> Iterator[None]:
    """The kernels that a worker on CPU registers, and PAT's patch."""
    current_platform.import_kernels()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(rejection_sampler).items()):
            if name.endswith("_kernel") or name.startswith(("expand_", "apply_")):
                patch.setattr(rejection_sampler, name, value)
        let_vllm_look_at_numba()
        current_platform.register_triton_kernel_overrides()
        drafts.verify_sampled_drafts()
        yield


def law(logits: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    least = logits.topk(top_k).values[..., -1:]
    return (logits.masked_fill(logits < least, -torch.inf) / temperature).double().softmax(-1)


def test_verified_drafts_follow_the_law() -> None:
    """All rows verify the same drafts. Each verified position is one of the law's draws."""
    steps = ROWS // (len(KINDS) + 1)
    logits = torch.randn(DRAFTS, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    drafted = logits.argmax(-1).to(torch.int32)
    ends = torch.arange(1, ROWS + 1, dtype=torch.int32) * DRAFTS
    parameters: Any = SimpleNamespace(
        all_greedy=False,
        all_random=False,
        temperature=torch.tensor([*(temperature for temperature, _ in KINDS), 0.0]).repeat(steps),
        top_k=torch.tensor([*(top_k for _, top_k in KINDS), VOCAB]).int().repeat(steps),
        top_p=None,
        generators={},
    )
    constrained = rejection_sampler.apply_sampling_constraints(
        logits.repeat(ROWS, 1), ends, parameters
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        output = rejection_sampler.rejection_sample(
            drafted.repeat(ROWS),
            [DRAFTS] * ROWS,
            DRAFTS,
            ends,
            None,
            constrained,
            torch.full((ROWS, 1), BONUS),
            parameters,
        )
    for number, kind in enumerate(KINDS):
        tokens = output[number :: len(KINDS) + 1]
        for position, probabilities in enumerate(law(logits, *kind)):
            drawn = tokens[:, position].long()
            counts = torch.bincount(drawn, minlength=VOCAB)
            possible = probabilities > 0
            assert not counts[~possible].any()
            # Rare tokens together, for chi-square.
            often = possible & (probabilities * len(drawn) >= 10)
            seen = [*counts[often].tolist(), int(counts[~often].sum())]
            expected = [*(probabilities[often] * len(drawn)).tolist()]
            expected.append(max(len(drawn) - sum(expected), 0.0))
            if expected[-1] < 10:
                seen, expected = seen[:-1], expected[:-1]
                expected = [count * sum(seen) / sum(expected) for count in expected]
            assert chisquare(seen, expected).pvalue > 1e-3
            tokens = tokens[drawn == drafted[position]]
        assert len(tokens) > 50
        assert (tokens[:, DRAFTS] == BONUS).all()
    greedy = output[len(KINDS) :: len(KINDS) + 1]
    assert (greedy == torch.tensor([*drafted.tolist(), BONUS])).all()
