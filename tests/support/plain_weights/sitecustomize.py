"""Applies `plain_weights` in every process that has this folder on PYTHONPATH."""

import os
import runpy
import sys
from pathlib import Path

# Now: a child of a process that had no PYTHONPATH may get another path.
from plain_weights import ON_IMPORT

sys.path.append(str(Path(__file__).parents[1]))
from on_import import patch_on_import

patch_on_import(ON_IMPORT)
if os.environ.get("TRITON_INTERPRET") == "1":  # a process has one `sitecustomize`, and this is it
    runpy.run_path(str(Path(__file__).parents[1] / "v2_on_cpu" / "sitecustomize.py"))
