"""How whoever wants to know hears what happens in an engine. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pat_vllm.layout import Layout
    from pat_vllm.profile import StepShape
    from pat_vllm.reporting.values import BatchReport, DraftCounts, RefusedSwitch, SwitchReport


class EngineListener:
    """Is told of each event on the engine's thread, in microseconds; does nothing until overridden.

    Times are seconds on one monotonic clock, which a simulator may make up.
    """

    learns: ClassVar[bool] = False
    """Whether `verified` is of use to it, which takes time to find out."""

    def arrived(self, now: float, repeated: bool = False) -> None:
        """A request has arrived. `repeated`: there are earlier responses to draft from."""

    def stepped(self, now: float, layout: Layout, shape: StepShape, seconds: float) -> None:
        """A replica finished a step; `seconds` since its previous one, or since it was started."""

    def drafted(
        self, now: float, layout: Layout, replica: int, length: int, counts: DraftCounts
    ) -> None:
        """A replica finished a step that may have verified drafts; for the arguments, see
        `DraftSample`."""

    def verified(
        self,
        now: float,
        length: int,
        requests: int,
        accepted: npt.NDArray[np.int64],
        repeated: bool = False,
        drafted: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """A replica finished a step that could have verified drafts; see `Acceptance.observe`.

        It is called twice for a step that had both kinds of requests: with earlier responses
        (`repeated`), and without.
        """

    def ended(self, now: float, num_output_tokens: int, complete: bool | None) -> None:
        """A request ended.

        Args:
            complete: whether no abort and no `max_tokens` cut it short; None: its length was
                prescribed, and tells nothing about other requests.
        """

    def switched(self, report: SwitchReport) -> None:
        """The engine has switched, for whatever reason."""

    def refused(self, refused: RefusedSwitch) -> None:
        """A switch that was asked for could not be made."""

    def weights_changed(self) -> None:
        """The model's weights may be others than before."""

    def idle(self, now: float) -> None:
        """No request is left. The batch may go on: an agent's tools may be running."""

    def batch_over(self, now: float, batch: BatchReport | None = None) -> None:
        """The batch is over: no request is left, and the next one begins another batch.

        Args:
            batch: what it was; None: no request has come since the last one.
        """
