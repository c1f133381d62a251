"""vLLM's rejection sampler on CPU, as PAT has it verify drafts, follows the law of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample import rejection_sampler

from pat_vllm.patches import drafts
from tests.speculation.law import Sampling, chi_square
from tests.support.mutation import mutated

# vLLM's registry of kernels looks at all that modules hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")

ROWS, DRAFTS, VOCAB = 20_000, 3, 16
KINDS = (Sampling(), Sampling(temperature=1.5), Sampling(temperature=2.0, top_k=6))
"""How requests sample, in turn; after these comes a greedy one."""
BONUS = VOCAB - 1


@pytest.fixture(scope="module", autouse=True)
def sampler_of_cpu() -> Any:
    """The kernels that a worker on CPU registers, and PAT's patch."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(rejection_sampler).items()):
            if name.endswith("_kernel") or name.startswith(("expand_", "apply_")):
                patch.setattr(rejection_sampler, name, value)
        current_platform.register_triton_kernel_overrides()
        drafts.verify_sampled_drafts()
        yield


def check() -> None:
    """All rows verify the same drafts. Each verified position is one of the law's draws."""
    steps = ROWS // (len(KINDS) + 1)
    logits = torch.randn(DRAFTS, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    drafts = logits.argmax(-1).to(torch.int32)
    ends = torch.arange(1, ROWS + 1, dtype=torch.int32) * DRAFTS
    parameters: Any = SimpleNamespace(
        all_greedy=False,
        all_random=False,
        temperature=torch.tensor([*(kind.temperature for kind in KINDS), 0.0]).repeat(steps),
        top_k=torch.tensor([*(kind.top_k or VOCAB for kind in KINDS), VOCAB]).int().repeat(steps),
        top_p=None,
        generators={},
    )
    constrained = rejection_sampler.apply_sampling_constraints(
        logits.repeat(ROWS, 1), ends, parameters
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        output = rejection_sampler.rejection_sample(
            drafts.repeat(ROWS),
            [DRAFTS] * ROWS,
            DRAFTS,
            ends,
            None,
            constrained,
            torch.full((ROWS, 1), BONUS),
            parameters,
        ).numpy()
    for number, kind in enumerate(KINDS):
        tokens = output[number :: len(KINDS) + 1]
        for position, law in enumerate(kind.law(logits.double().numpy())):
            drawn = tokens[:, position].astype(np.int64)
            assert chi_square(drawn, np.tile(law, (len(drawn), 1))) > 1e-3
            tokens = tokens[drawn == drafts[position].item()]
        assert len(tokens) > 50
        assert (tokens[:, DRAFTS] == BONUS).all()
    assert (output[len(KINDS) :: len(KINDS) + 1] == [*drafts.tolist(), BONUS]).all()


def test_verified_drafts_follow_the_law() -> None:
    check()


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        pytest.param(
            rejection_sampler.generate_uniform_probs,
            {"return uniform_probs": "return uniform_probs.zero_()"},
            id="every draft is accepted",
        ),
        pytest.param(
            rejection_sampler.sample_recovered_tokens,
            {
                "cu_num_draft_tokens,\n        draft_token_ids,": "cu_num_draft_tokens,\n"
                "        torch.zeros_like(draft_token_ids),"
            },
            id="what replaces a draft may be the draft",
        ),
        pytest.param(
            drafts._of_each_token,
            {"x.repeat": "x.roll(1).repeat"},
            id="temperature and top-k of the request before",
        ),
        pytest.param(
            drafts._of_each_token,
            {"of_tokens.masked_fill(of_tokens == replace_from, replace_to)": "of_tokens"},
            id="greedy requests are divided by zero",
        ),
    ],
)
def test_a_mistake_is_seen(function: Any, changes: dict[str, str]) -> None:
    with mutated(function, changes), pytest.raises((AssertionError, RuntimeError)):
        check()
