"""Drafters of linear attention: n-grams, without prefix caching; the text of every pair."""

from __future__ import annotations

import pytest

from tests.engine.specs import MTP_LINEAR, NGRAM_LINEAR
from tests.engine.v2.test_drafters import (  # noqa: F401
    test_linear_attention_goes_on_from_the_last_accepted_token,
    test_text_is_that_without_drafts,
)

pytestmark = pytest.mark.engine(MTP_LINEAR, NGRAM_LINEAR)

ENGINES = {
    "test_linear_attention_goes_on_from_the_last_accepted_token": [NGRAM_LINEAR],
    "test_text_is_that_without_drafts": [MTP_LINEAR],
}
