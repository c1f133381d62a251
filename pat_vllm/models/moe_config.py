"""Mixtures of experts, and how their experts can lie in layouts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pat_vllm.layout import Experts
from pat_vllm.models.layer_sizes import experts_of

WantedExperts: TypeAlias = Literal["auto", "tp", "ep"]


@dataclass(frozen=True)
class MoEConfig:
    """What of a model's experts decides on how they can lie.

    Attributes:
        num_experts: experts of a layer, without those that every token goes to.
        intermediate: width of an expert, elements.
    """

    num_experts: int
    intermediate: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MoEConfig | None:
        """From the contents of a Hugging Face `config.json`; None: the model has no experts."""
        experts = experts_of(config)
        return None if experts is None else cls(*experts)

    def resolve(self, wanted: WantedExperts, tps: Collection[int]) -> Experts:
        """How the experts lie in an engine with layouts of these tps; "auto" cuts them if it can.

        Args:
            tps: the smallest is the base layout's.

        Raises:
            ValueError: the experts cannot lie so in all layouts.
        """
        kinds: tuple[Experts, ...] = ("tp", "ep") if wanted == "auto" else (wanted,)
        reasons = []
        for kind in kinds:
            obstacles = ((tp, self._obstacle(kind, tp, min(tps))) for tp in sorted(tps) if tp > 1)
            found = next(((tp, why) for tp, why in obstacles if why is not None), None)
            if found is None:
                return kind
            reasons.append("layout tp={}: {}".format(*found))
        raise ValueError(
            f"pat.experts={wanted!r}: {'; '.join(reasons)}. Change pat.layouts or pat.experts."
        )

    def _obstacle(self, kind: Experts, tp: int, base_tp: int) -> str | None:
        """Why experts cannot lie so in a layout, if they cannot."""
        if kind == "tp":
            if self.intermediate % tp:
                return f"experts of width {self.intermediate} cannot be cut {tp} ways"
        elif self.num_experts < tp:
            return f"{self.num_experts} experts cannot be spread over {tp} ranks"
        elif base_tp > 1 and self.num_experts % tp:
            return (
                f"{self.num_experts} experts do not divide among {tp} ranks, so that a rank would "
                f"lack some of them with base_tp={base_tp}"
            )
        return None
