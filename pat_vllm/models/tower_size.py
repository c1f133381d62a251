"""What a vision tower takes: its weights, and what it keeps of images. Pure.

Every rank has the tower whole, in every layout, and in the model's type. Of Gemma 3's, which is cut
over the ranks of a group, that is what a rank of tp=1 has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pat_vllm.models.layer_sizes import size_of

LARGEST_IMAGE = 16384
"""Tokens of the largest image or video that is counted with. It is Qwen's limit of an image; vLLM
has another of the processor's, which a checkpoint may set."""

_POSITIONS = 8192
"""Rows of the table of rotary embeddings of vLLM's Qwen towers."""


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
        axes: positions that a token has, of time, row and column (M-RoPE), or one.
    """

    weights: int
    patch_width: int
    merged: int
    hidden: int
    levels: int
    axes: int = 3

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TowerSize:
        """From the contents of a `config.json` of a class in `SERVED` (`images.py`).

        Raises:
            ValueError: a size is missing, or the tower is of another kind.
        """
        vision = config.get("vision_config") or {}
        if "depth" in vision:
            return cls._of_qwen(vision)
        text = config.get("text_config") or config
        return cls._of_siglip(vision, size_of(text, "hidden_size"), _tokens_of_image(config))

    @classmethod
    def _of_qwen(cls, vision: Mapping[str, Any]) -> TowerSize:
        names = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "patch_size")
        depth, width, mlp, hidden, patch, heads = _sizes(vision, (*names, "num_heads"))
        merged = (size_of(vision, "spatial_merge_size") or 2) ** 2
        frames = size_of(vision, "temporal_patch_size") or 2
        matrices = 3 if "fullatt_block_indexes" in vision else 2  # Qwen2.5-VL's MLPs have gates
        levels = len(vision.get("deepstack_visual_indexes") or ())
        embeddings = frames * 3 * patch**2 * width
        embeddings += size_of(vision, "num_position_embeddings") * width
        merger = merged * width * (merged * width + hidden)
        return cls(
            weights=depth * width * (4 * width + matrices * mlp)
            + (1 + levels) * merger
            + embeddings
            + _POSITIONS * width // heads // 2,
            patch_width=4 * width + matrices * mlp,
            merged=merged,
            hidden=hidden,
            levels=levels,
        )

    @classmethod
    def _of_siglip(cls, vision: Mapping[str, Any], hidden: int, tokens: int) -> TowerSize:
        """Of Gemma 3, which joins patches by their mean."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "image_size")
        depth, width, mlp, side, patch = _sizes(vision, (*names, "patch_size"))
        patches = (side // patch) ** 2
        embeddings = (3 * patch**2 + patches) * width
        return cls(
            weights=depth * width * (4 * width + 2 * mlp) + embeddings + width * hidden,
            patch_width=4 * width + 2 * mlp,
            merged=patches // tokens,
            hidden=hidden,
            levels=0,
            axes=1,
        )

    def embeddings(self, tokens: int) -> int:
        """Elements that a tower's output for so many tokens has."""
        return tokens * self.hidden * (1 + self.levels)

    def step(self, tokens: int) -> int:
        """Elements that a tower computes in, for images of so many tokens at once."""
        return tokens * self.merged * self.patch_width + self.embeddings(tokens)


def _tokens_of_image(config: Mapping[str, Any]) -> int:
    return size_of(config, "mm_tokens_per_image") or 256


def _sizes(vision: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    if missing := [name for name in names if not vision.get(name)]:
        raise ValueError(f"the model's vision_config has no {', '.join(missing)}")
    return (size_of(vision, name) for name in names)
