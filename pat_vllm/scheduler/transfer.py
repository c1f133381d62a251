"""How requests take their KV along at a switch: as the user says, or the cheaper way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pat_vllm.predictor.cost import TransferCost
from pat_vllm.reporting import SwitchReport


@dataclass
class ConfiguredTransfer:
    """The option `kv_transfer`.

    Attributes:
        mode: "auto" takes the cheaper way for each request.
        cost: what each way costs; real exchanges correct it.
    """

    mode: Literal["auto", "migrate", "recompute"]
    cost: TransferCost

    def choose(self, num_tokens: int, tp: int) -> Literal["migrate", "recompute"]:
        """For a request with `num_tokens` computed tokens, in a target layout of `tp`."""
        return self.cost.cheaper(num_tokens, tp) if self.mode == "auto" else self.mode

    def observe(self, report: SwitchReport) -> None:
        """Learn from a switch."""
        self.cost = self.cost.with_exchange(report.kv_bytes, report.kv)
