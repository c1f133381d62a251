"""What a vision tower takes: its weights, and what it keeps of images. Pure.

Every rank has the tower whole, in every layout, and in the model's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pat_vllm.models.layer_sizes import size_of

LARGEST_IMAGE = 16384
"""Tokens of the largest image or video that is counted with. It is Qwen's limit of an image; vLLM
has another of the processor's, which a checkpoint may set."""


@dataclass(frozen=True)
class TowerSize:
    """The sizes of a tower, counted in elements.

    Attributes:
        weights: all of them.
        patch_width: what a patch takes while a layer computes.
        merged: patches that become one token of the text model.
        hidden: width of that model.
        levels: layers of that model beside the first that are given something of an image, too
            (Qwen3-VL's deepstack).
    """

    weights: int
    patch_width: int
    merged: int
    hidden: int
    levels: int

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> TowerSize | None:
        """From the `vision_config` of a `config.json`, of Qwen's classes; None: there is none.

        Raises:
            ValueError: a size is missing.
        """
        if not config:
            return None
        names = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "patch_size")
        if missing := [name for name in names if not config.get(name)]:
            raise ValueError(f"the model's vision_config has no {', '.join(missing)}")
        depth, width, mlp, hidden, patch = (size_of(config, name) for name in names)
        merged = (size_of(config, "spatial_merge_size") or 2) ** 2
        frames = size_of(config, "temporal_patch_size") or 2
        channels = size_of(config, "in_channels") or 3
        matrices = 3 if "fullatt_block_indexes" in config else 2  # Qwen2.5-VL's MLPs have gates
        layer = 4 * width**2 + matrices * width * mlp
        merger = merged * width * (merged * width + hidden)
        levels = len(config.get("deepstack_visual_indexes") or ())
        embeddings = frames * channels * patch**2 * width
        embeddings += size_of(config, "num_position_embeddings") * width
        return cls(
            weights=depth * layer + (1 + levels) * merger + embeddings,
            patch_width=4 * width + matrices * mlp,
            merged=merged,
            hidden=hidden,
            levels=levels,
        )

    def embeddings(self, tokens: int) -> int:
        """Elements that a tower's output for so many tokens has."""
        return tokens * self.hidden * (1 + self.levels)

    def step(self, tokens: int) -> int:
        """Elements that a tower computes in, for images of so many tokens at once."""
        return tokens * self.merged * self.patch_width + self.embeddings(tokens)
