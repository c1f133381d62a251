"""verl's `mtp.enable_rollout`: drafts by an MTP module that gets its weights with the model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("verl")

from tests.support.drafters import mimo
from tests.support.v2_on_cpu.v2_on_cpu import VARIABLES
from tests.verl.models import KNOWN, few_tokens
from tests.verl.reference import Reference
from tests.verl.servers import Server, server
from tests.verl.test_classes import IN_PLACE
from tests.verl.test_server import PROMPTS, regrouped

MTP = {"mtp.enable": True, "mtp.enable_rollout": True, "mtp.num_speculative_tokens": 2}


def model(seed: int, finish: Callable[[Path], object] | None = mimo) -> Path:
    return few_tokens("qwen2", seed, repeat=1.2, finish=finish)


def counts(pat: Server) -> tuple[int, int]:
    """Drafts so far, and how many of them were accepted."""
    samples = [sample.counts for sample in pat.call("pat_report").drafts]
    return sum(each.drafted for each in samples), sum(each.accepted for each in samples)


def test_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts with noise in both, so that only what was pushed can draft.

    Outputs are compared with transformers, which does not know the module. An actor without one
    pushes no weights of it: drafts are no better then, and the report says why.
    """
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    without = model(0, finish=None)
    with server(model(0), *IN_PLACE, of_model=MTP, load_format="dummy") as pat:
        accepted = []
        for step, pushed in enumerate((without, model(0), model(1))):
            assert pat.call("pat_switch", 1 + step % 2)
            pat.do(pat.push(pushed, step))
            expected = Reference(pushed, KNOWN + 1)  # Qwen2's tokenizers get an end of their own
            pat.call("pat_speculate", 2)  # however little was accepted of the drafts before
            before = counts(pat)
            # The first step after a switch verifies no drafts.
            expected.check(regrouped(pat, max_tokens=40, pause=1), PROMPTS)
            drafted, right = (now - then for now, then in zip(counts(pat), before, strict=True))
            accepted.append(right / drafted)
            assert pat.call("pat_report").drafter_is_stale == (pushed is without)
        assert accepted[0] < 0.05 and min(accepted[1:]) > 0.1, accepted
