"""What `tests/engine/test_features.py` asks of an engine beside its batch, of one with drafts.

At a draft length of 1, so that as many steps as without speculation go by.
"""

from __future__ import annotations

import pytest

from tests.engine.specs import DRAFTS
from tests.engine.speculation.test_features import jobs, jobs_without, plain, runs  # noqa: F401
from tests.engine.test_features import (  # noqa: F401
    test_aborts,
    test_prefix_caching,
    test_prefix_caching_across_a_switch,
    test_priorities,
    test_reset_prefix_cache_while_requests_run,
    test_sleep_aborts_by_default,
    test_sleep_and_wake_up,
    test_unseeded_samples_differ_and_ranks_agree,
)

pytestmark = pytest.mark.engine(DRAFTS)
