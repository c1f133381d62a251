"""Applies `plain_weights` in every process that has this folder on PYTHONPATH."""

import sys
from pathlib import Path

# Now: a child of a process that had no PYTHONPATH may get another path.
from plain_weights import ON_IMPORT

sys.path.append(str(Path(__file__).parents[1]))
from on_import import patch_on_import

patch_on_import(ON_IMPORT)
