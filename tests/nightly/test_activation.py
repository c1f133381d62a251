"""PAT by its option `enabled`, where somebody else names the backend: local processes and Ray.

What `tests/engine` asks of engines by the word "pat", beside what it asks of such engines itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.specs import FEATURES, IN_PLACE, MIGRATE, UPDATES, WHOLE_PROMPTS
from tests.engine.test_features import (  # noqa: F401
    jobs,
    outcome,
    plain,
    runs,
    test_aborts,
    test_logprobs,
    test_metrics_are_those_of_one_engine,
    test_outputs_equal_those_of_one_layout,
    test_penalties_have_an_effect,
    test_prefix_caching,
    test_prefix_caching_across_a_switch,
    test_priorities,
    test_prompt_logprobs,
    test_reset_prefix_cache_while_requests_run,
    test_several_samples,
    test_sleep_and_wake_up,
    test_stop_strings,
    test_streaming,
    test_structured_outputs,
    test_token_restrictions,
    test_unseeded_samples_differ_and_ranks_agree,
)
from tests.engine.test_ray import cluster  # noqa: F401
from tests.engine.test_weight_updates import (  # noqa: F401
    test_an_update_reaches_every_layout,
    test_conversations_use_no_kv_of_old_weights,
    updated,
)
from tests.support.pool import EnginePool, EngineSpec

pytest.importorskip("ray")


def over(backend: str, name: str, pat: dict[str, Any], options: dict[str, Any]) -> EngineSpec:
    given = {**options, "distributed_executor_backend": backend}
    return EngineSpec(f"{backend} {name}", "qwen3", 2, pat | {"enabled": True}, given)


ALL = [over(backend, "features", MIGRATE, FEATURES) for backend in ("mp", "ray")]
UPDATED = [over("ray", "updates", IN_PLACE, UPDATES | WHOLE_PROMPTS)]
pytestmark = pytest.mark.engine(*ALL)
ENGINES = {
    "test_an_update_reaches_every_layout": UPDATED,
    "test_conversations_use_no_kv_of_old_weights": UPDATED,
}


@pytest.fixture(scope="module", autouse=True)
def no_engine_outlives_the_cluster(cluster: str, engines: EnginePool) -> Iterator[None]:  # noqa: F811
    yield
    engines.close()
