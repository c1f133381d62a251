"""The weights that a drafter has to itself, beside the target's.

vLLM loads a drafter after its target, by the same loader, and then has it use modules of the
target, such as embeddings, in place of its own. What it shares so in the base layout, it shares in
every layout: with smaller shards, or before rows are in place, values would be compared that say
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from vllm.config import ModelConfig

from pat_vllm.patches.drafts import share_with_target

DRAFTER = "drafter"
"""What names of a drafter's weights begin with."""
_SHARED = {"has_own_embed_tokens": "model.embed_tokens", "has_own_lm_head": "lm_head"}
"""By vLLM's flag that a drafter has a module of its own: the module's name."""


def is_drafters(model_config: ModelConfig | None) -> bool:
    """Whether vLLM loads a drafter, and not the target, by this config."""
    return model_config is not None and model_config.runner_type == "draft"


class Drafter(nn.Module):
    """A drafter's own modules: those of the target that it uses are not among them."""

    def __init__(self, model: nn.Module, target: nn.Module | None = None) -> None:
        """`target`: None before vLLM has had the drafter use modules of it."""
        super().__init__()
        self.add_module(DRAFTER, model)
        self._of_target = frozenset(() if target is None else target.modules())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        return super().named_modules(memo | self._of_target, prefix, remove_duplicate)


def shared_names(drafter: Any, target: nn.Module) -> frozenset[str]:
    """The names that weights of the target's have in a drafter that uses them."""
    of_target = set(target.parameters())
    named = drafter.named_parameters(remove_duplicate=False)
    return frozenset(name for name, weight in named if weight in of_target)


def sharing_as(drafter: nn.Module, target: nn.Module, use_v2: bool) -> AbstractContextManager[None]:
    """Inside, drafters of other layouts share what the base layout's shares with its target."""
    of_target = set(target.modules())
    modules: dict[str, Any] = dict(drafter.named_modules(remove_duplicate=False))
    return share_with_target(
        {flag: modules.get(name) in of_target for flag, name in _SHARED.items()}, use_v2
    )
