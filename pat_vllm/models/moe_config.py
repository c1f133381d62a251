"""Mixtures of experts, and the layouts in which their experts can lie. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pat_vllm.layout import Experts, Layout
from pat_vllm.models.layer_sizes import experts_of

WantedExperts: TypeAlias = Literal["auto", "tp", "ep", "both"]


@dataclass(frozen=True)
class MoEConfig:
    """What of a model's experts decides on how they can lie.

    Attributes:
        num_experts: of a layer, without those that every token goes to.
        intermediate: width of an expert, elements.
    """

    num_experts: int
    intermediate: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MoEConfig | None:
        """From the contents of a Hugging Face `config.json`; None: the model has no experts."""
        experts = experts_of(config)
        return None if experts is None else cls(*experts)

    def layouts(
        self, tps: Collection[int], world_size: int, wanted: WantedExperts
    ) -> tuple[Layout, ...]:
        """The layouts to keep ready, ascending in tp, cut experts before spread ones.

        With a base layout of one rank, which has all experts whole, "both" is every way in which
        experts can lie. A wider one has either parts or whole experts, and all layouts like it.
        "auto" is "both", or parts where there is one kind.

        Args:
            tps: the smallest is the base layout's.

        Raises:
            ValueError: the experts cannot lie so.
        """
        base_tp = min(tps)
        if wanted == "both" and base_tp > 1:
            raise ValueError(
                f"pat.experts is 'both', but with base_tp={base_tp} a rank has either parts of "
                "experts or whole ones; set pat.base_tp=1, or pat.experts to 'tp' or 'ep'"
            )
        kinds: tuple[Experts, ...] = ("tp", "ep")
        if wanted == "tp" or wanted == "ep":
            kinds = (wanted,)
        elif base_tp > 1:
            kinds = ("tp",)
        layouts = []
        for tp in sorted(tps):
            if tp == 1:
                layouts.append(Layout.of(1, world_size))
                continue
            incompatibilities = {kind: self._incompatibility(kind, tp, base_tp) for kind in kinds}
            fitting = [
                kind
                for kind, incompatibility in incompatibilities.items()
                if incompatibility is None
            ]
            if not fitting:
                reasons = "; ".join(filter(None, incompatibilities.values()))
                raise ValueError(
                    f"layout tp={tp} with pat.experts={wanted!r}: {reasons}. Change pat.layouts or "
                    "pat.experts."
                )
            layouts += [Layout.of(tp, world_size, kind) for kind in fitting]
        return tuple(layouts)

    def _incompatibility(self, kind: Experts, tp: int, base_tp: int) -> str | None:
        """Why experts cannot lie so, if they cannot."""
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
