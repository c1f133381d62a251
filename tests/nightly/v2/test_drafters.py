"""Drafters with weights, with Model Runner V2; n-grams of linear attention, without caching."""

from __future__ import annotations

import pytest

from tests.engine.specs import (
    MTP_LINEAR,
    NGRAM_LINEAR,
    V2_EAGLE3,
    V2_MTP,
    V2_SELF_DRAFTS,
)
from tests.engine.test_drafters import (
    test_all_drafts_are_right_beside_a_request_near_the_longest_context,
    test_all_drafts_are_right_from_the_second_step_after_a_switch,
    test_all_drafts_are_right_when_the_draft_length_has_been_0,
    test_drafts_are_planned_by_a_profile_with_their_passes,
    test_drafts_are_right_after_an_update_of_both,
    test_text_is_that_without_drafts,
)
from tests.engine.v2.test_drafters import (
    test_linear_attention_goes_on_from_the_last_accepted_token,
)
from tests.nightly.test_drafters import test_storm

__all__ = [
    "test_all_drafts_are_right_beside_a_request_near_the_longest_context",
    "test_all_drafts_are_right_from_the_second_step_after_a_switch",
    "test_all_drafts_are_right_when_the_draft_length_has_been_0",
    "test_drafts_are_planned_by_a_profile_with_their_passes",
    "test_drafts_are_right_after_an_update_of_both",
    "test_linear_attention_goes_on_from_the_last_accepted_token",
    "test_storm",
    "test_text_is_that_without_drafts",
]
pytestmark = pytest.mark.engine(V2_SELF_DRAFTS, V2_MTP, V2_EAGLE3, MTP_LINEAR, NGRAM_LINEAR)

ENGINES = {
    "test_all_drafts_are_right_beside_a_request_near_the_longest_context": [V2_SELF_DRAFTS],
    "test_all_drafts_are_right_from_the_second_step_after_a_switch": [V2_SELF_DRAFTS],
    "test_all_drafts_are_right_when_the_draft_length_has_been_0": [V2_SELF_DRAFTS],
    "test_drafts_are_right_after_an_update_of_both": [V2_SELF_DRAFTS],
    "test_drafts_are_planned_by_a_profile_with_their_passes": [V2_MTP],
    "test_linear_attention_goes_on_from_the_last_accepted_token": [NGRAM_LINEAR],
    "test_text_is_that_without_drafts": [V2_MTP, V2_EAGLE3, MTP_LINEAR],
    "test_storm": [V2_SELF_DRAFTS, V2_MTP, V2_EAGLE3],
}
