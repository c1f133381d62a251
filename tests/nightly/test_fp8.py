"""The tests of fp8 weights and activations on more forms of them."""

from __future__ import annotations

import pytest

from tests.engine.specs import FP8, FP8_MIXTURE, IN_PLACE, WHOLE_PROMPTS
from tests.engine.test_fp8 import (  # noqa: F401
    test_each_layout_is_stock_vllm_at_its_tp,
    test_requests_in_flight_go_on_as_near_as_layouts_are,
)
from tests.engine.test_switch import (  # noqa: F401
    case,
    test_storm_of_trajectories,
    test_the_next_turn_finds_its_kv_after_a_switch,
)
from tests.support.pool import EngineSpec

OPTIONS = WHOLE_PROMPTS | {"dtype": "bfloat16"}
pytestmark = pytest.mark.engine(
    EngineSpec("fp8 tensors", "fp8_tensors", 4, IN_PLACE, OPTIONS),
    EngineSpec("fp8 modelopt", "fp8_modelopt", 2, IN_PLACE | {"base_tp": 1}, OPTIONS),
    EngineSpec(
        "fp8 tensors online", "fp8", 2, IN_PLACE, OPTIONS | {"quantization": "fp8_per_tensor"}
    ),
    EngineSpec(
        "fp8 mixture online",
        "fp8_moe",
        2,
        IN_PLACE | {"experts": "tp"},
        OPTIONS | {"quantization": "fp8_per_channel"},
    ),
)
ENGINES = {
    "test_storm_of_trajectories": [FP8, FP8_MIXTURE],
    "test_the_next_turn_finds_its_kv_after_a_switch": [FP8, FP8_MIXTURE],
}
