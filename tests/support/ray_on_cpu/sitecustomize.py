"""Applies `ray_on_cpu` in every process that has this folder on PYTHONPATH: Ray's, too."""

import sys
from pathlib import Path

# Now: a child of a process that had no PYTHONPATH may get another path.
from ray_on_cpu import MODULE, patch

sys.path.append(str(Path(__file__).parents[1]))
from on_import import patch_on_import

patch_on_import({MODULE: patch})
