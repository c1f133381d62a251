"""torchvision beside the CPU's torch, without its compiled operators.

Test support only. pip takes a build for CUDA, whose operators do not load beside the CPU's torch,
and which then cannot be imported ("operator torchvision::nms does not exist"): it says of two
operators, which nothing here calls, what torch is to make of them. So they are defined by name
first. What image processors need of torchvision is Python over torch's own operators. `make venv`
has the package in a folder that only processes with this one on PYTHONPATH look into.
"""

from pathlib import Path

import torch

_PACKAGE = Path(__file__).parents[4] / ".venv" / "torchvision" / "torchvision"
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

__file__ = str(_PACKAGE / "__init__.py")
__path__ = [str(_PACKAGE)]
exec(compile(Path(__file__).read_text(), __file__, "exec"))
