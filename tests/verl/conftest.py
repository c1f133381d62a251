"""verl's tests need an environment of their own (`make test-verl`); elsewhere they are skipped."""

import importlib.util
import os
import sys

from tests.verl.environment import variables

if importlib.util.find_spec("verl") is not None:
    # Before anything imports verl or vLLM. Ray's workers and the engines inherit it.
    os.environ.update(variables())
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)[:2]
