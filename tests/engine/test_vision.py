"""Vision-language classes as text models: they say what their text models say, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

import pat_vllm
from pat_vllm.layout import Layout
from tests.engine.specs import VISION
from tests.engine.test_switch import (  # noqa: F401
    at_steps,
    batch,
    case,
    test_every_ordered_pair_of_layouts,
    test_what_moves_is_what_requests_hold,
)
from tests.engine.test_weight_updates import (  # noqa: F401
    PLAIN,
    test_an_update_reaches_every_layout,
    updated,
)
from tests.support.engines import run
from tests.support.pool import EngineSpec
from tests.support.same import PLAIN_TOLERANCE, assert_same
from tests.support.stock import stock_answers
from tests.support.vision import CLASSES

pytestmark = pytest.mark.engine(VISION)


def test_a_class_says_what_its_text_model_says(llm: Any, spec: EngineSpec) -> None:
    """Before a switch and after it; the two classes round otherwise."""
    text, *_ = CLASSES[spec.model]
    expected = stock_answers(text, batch(), **PLAIN, max_num_batched_tokens=1000)
    outcomes = run(llm, batch(), before_step=at_steps(llm, {9: 2}))
    for name, outcome in outcomes.items():
        expected[name].text = outcome.text  # tokens that stand for images are no text
    assert_same(outcomes, expected, PLAIN_TOLERANCE)


def positions(worker: Any, layout: Layout) -> dict[str, tuple[list[list[int]], int]]:
    """Of each request of this rank's replica, three positions for each token of its prompt, and
    how far those of its output lie from their numbers."""
    return {
        name: (state.mrope_positions.tolist(), state.mrope_position_delta)
        for name, state in worker._runtimes[layout].runner.requests.items()
    }


def test_a_switch_carries_the_positions_of_tokens(llm: Any) -> None:
    """Also to ranks that had not seen a request before."""
    assert llm.llm_engine.vllm_config.model_config.uses_mrope
    seen = []

    def before_step(step: int) -> None:
        at_steps(llm, {0: 1, 5: 2, 9: 1})(step)
        if step in (5, 9):
            seen.append(llm.collective_rpc(positions, args=(pat_vllm.report(llm).layout,)))

    run(llm, batch(), before_step=before_step)
    in_group, in_replicas = seen
    assert in_group[0] == in_group[1] == {**in_replicas[0], **in_replicas[1]}
    assert in_replicas[0] and in_replicas[1]
    assert sorted(len(rows[0]) for rows, _ in in_group[0].values()) == sorted(
        len(job.prompt) for job in batch().values()
    )
    assert all(mrope == ([[*range(len(mrope[0][0]))]] * 3, 0) for mrope in in_group[0].values())


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
WITH_AN_IMAGE = {
    "a prompt": lambda llm: llm.generate({"prompt": "hello", "multi_modal_data": {"image": [1]}}),
    "a chat": lambda llm: llm.chat(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]
    ),
}


@pytest.mark.parametrize("way", WITH_AN_IMAGE)
def test_an_image_is_refused_and_nothing_is_lost(llm: Any, way: str) -> None:
    def before_step(step: int) -> None:
        if step == 4:
            with pytest.raises(
                (ValueError, VLLMValidationError), match=r"text-only models|At most 0 image"
            ):
                WITH_AN_IMAGE[way](llm)

    assert_same(run(llm, batch(), before_step=before_step), run(llm, batch()), PLAIN_TOLERANCE)
    assert pat_vllm.report(llm).layout.tp == 1
