"""The tests of Model Runner V2 on two ranks with copies of weights, and long storms."""

from __future__ import annotations

import pytest

from tests.engine.specs import MIGRATE, V2, V2_LATENT, V2_LINEAR
from tests.engine.v2 import test_pairs
from tests.engine.v2.batch import Served
from tests.engine.v2.test_pairs import (  # noqa: F401
    test_an_update_between_switches_reaches_every_layout,
    test_every_ordered_pair_of_layouts,
    test_every_ordered_pair_when_kv_is_computed_again,
    test_new_weights_come_while_the_engine_sleeps,
    test_null_blocks_are_clear_after_a_switch,
    test_sleep_and_wake_up_around_switches,
)
from tests.support.pool import EngineSpec

TWO = EngineSpec(
    "V2, two",
    V2.model,
    2,
    MIGRATE | {"weights": "materialized"},
    V2.options,
    model_runner_v2=True,
)
pytestmark = pytest.mark.engine(TWO)
ENGINES = {
    "test_every_ordered_pair_of_layouts": [TWO, V2_LINEAR],
    "test_null_blocks_are_clear_after_a_switch": [V2_LINEAR],
    "test_every_ordered_pair_when_kv_is_computed_again": [TWO, V2_LATENT, V2_LINEAR],
    "test_storm": [TWO, V2],
    "test_storm_of_other_kinds": [V2_LATENT, V2_LINEAR],
}


@pytest.mark.parametrize("copies", [2, 16])
def test_storm(served: Served, copies: int) -> None:
    test_pairs.test_storm(served, copies)


def test_storm_of_other_kinds(served: Served) -> None:
    """Of state: latent attention, and linear attention, which takes Triton's interpreter long."""
    test_pairs.test_storm(served, 2)
