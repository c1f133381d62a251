"""Lets Ray start as slowly as a busy machine has it start. Test support only.

Ray gives its own processes 30 to 100 seconds. Whoever waits for a cluster here is bounded by how
long it is silent (`tests/support/child.py`), or by the limit of a test.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

MODULE = "ray._private.services"
_SECONDS = 600

ENVIRONMENT = {
    "RAY_gcs_server_request_timeout_seconds": str(_SECONDS),
    "RAY_raylet_start_wait_time_s": str(_SECONDS),
    "RAY_worker_register_timeout_seconds": str(_SECONDS),
    "RAY_agent_register_timeout_ms": str(1000 * _SECONDS),
}
"""Limits of Ray's processes, which read them when they start."""


def patch(services: Any, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Patch the module `MODULE`, whose limits are constants, by `put`."""
    get_node, wait_for_node = services.get_node, services.wait_for_node

    @functools.wraps(get_node)
    def get_node_patiently(*args: Any) -> Any:
        give_up = time.monotonic() + _SECONDS
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # it is not known yet
                if time.monotonic() > give_up:
                    raise
            time.sleep(0.1)

    @functools.wraps(wait_for_node)
    def wait_for_node_patiently(address: str, name: str, timeout: float = 0) -> None:
        wait_for_node(address, name, _SECONDS)

    put(services, "get_node", get_node_patiently)
    put(services, "wait_for_node", wait_for_node_patiently)
