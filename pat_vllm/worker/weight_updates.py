"""The part of a worker that new weights come to, whichever layout is active."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from pat_vllm.executor.messages import CallFailed, Refreshed
from pat_vllm.weights.loaders import change_user_config

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base

    from pat_vllm.layout import Layout
    from pat_vllm.worker.layout_weights import LayoutWeights
    from pat_vllm.worker.runtime import LayoutRuntime
else:
    _Base = object  # vLLM's worker is a later base of the class that mixes this in

logger = init_logger(__name__)

_IN_EVERY_LAYOUT: set[str] = set()


def run_in_every_layout(method: str) -> None:
    """Have a worker method that changes the model itself run once for each layout's model.

    Other methods of trainers and users see the base layout's model only. To be called in the
    worker's process, for instance where the module of a worker extension is imported.

    Args:
        method: its name, as given to `collective_rpc`.
    """
    _IN_EVERY_LAYOUT.add(method)


class WeightUpdatesMixin(_Base):
    """What updates of weights, calls of the engine's user and sleep need beside vLLM's worker.

    The rest of PAT's worker, `PATWorkerMixin`, has the attributes and the methods left open here.
    """

    _active: LayoutRuntime
    _base: LayoutRuntime
    _runtimes: Mapping[Layout, LayoutRuntime]
    _weights: LayoutWeights

    def _activate(self, runtime: LayoutRuntime) -> None:
        raise NotImplementedError

    def _enter(self, runtime: LayoutRuntime) -> None:
        raise NotImplementedError

    def _synchronize_device(self) -> None:
        raise NotImplementedError

    def pat_call_in_base(
        self, method: str | bytes, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method of this worker, or a pickled function of it, in the base layout.

        New weights come to the base layout's model, whichever layout is active: vLLM's and the
        trainers' code finds that model. Methods given to `run_in_every_layout` run in each layout.
        `pat_refresh_weights` must follow before the next step.

        Returns:
            The result in the base layout, or `CallFailed`.
        """
        active = self._active
        try:
            if isinstance(method, str):
                function = getattr(self, method)
            else:
                function = functools.partial(cloudpickle.loads(method), self)
            if method in _IN_EVERY_LAYOUT:
                for runtime in self._runtimes.values():
                    if runtime is not self._base:
                        self._enter_for_a_call(runtime)
                        function(*args, **kwargs)
            self._enter_for_a_call(self._base)
            with disable_mtp_completeness_check():  # as in vLLM's transfers: some come in each call
                return function(*args, **kwargs)
        except Exception as error:
            logger.exception("a call of the engine's user failed")
            return CallFailed(str(error))
        finally:
            self._activate(active)

    def _enter_for_a_call(self, runtime: LayoutRuntime) -> None:
        """Enter a layout before a call that may write weights on other streams than the current.

        The call comes after the rows, and after a step that asynchronous scheduling has launched.
        """
        self._enter(runtime)
        self._synchronize_device()

    @torch.inference_mode()
    def pat_refresh_weights(self) -> Refreshed:
        """As `LayoutWeights.refresh`, and wait for the device. Collective."""
        if self._weights.loading:
            active = self._active
            self._enter_for_a_call(self._base)
            complete = self._weights.finish_update()
            self._activate(active)
            if not complete:
                return Refreshed.MISSING
        done = self._weights.refresh(self._active.layout)
        self._synchronize_device()
        if done and self._weights.drafter_is_stale:
            done |= Refreshed.WITH_STALE_DRAFTER
        return done

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """As in vLLM. Rows are put in the base layout's order before the memory is released."""
        self._weights.arrange(self._base.layout)
        self._synchronize_device()
        super().sleep(*args, **kwargs)

    def update_config(self, overrides: dict[str, Any]) -> None:
        """As in vLLM. What is said of loading is said of the user's loader, not of PAT's."""
        if (of_loading := overrides.get("load_config")) is not None:
            # vLLM 0.31 changes the runner's alone.
            changed = change_user_config(self.model_runner.load_config, of_loading)
            overrides = {**overrides, "load_config": changed}
        super().update_config(overrides)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self._weights.refuse_if_packed()
        super().reload_weights(*args, **kwargs)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """As in vLLM, which would look for a rank's entry of a list by the base layout's config."""
        if isinstance(update_info, list):
            update_info = update_info[self.rank]
        super().update_weights(update_info)

    def start_weight_update(self) -> None:
        """As in vLLM. What has been loaded by `load_weights` before is put in place first: else the
        next step would put it there, and end this update with it.

        Raises:
            RuntimeError: only some of a layer's weights have been loaded so.
        """
        self._weights.refuse_if_packed()
        if self._weights.loading and not self._weights.finish_update():
            raise RuntimeError(
                "an update by load_weights has brought only some weights of a quantized layer; "
                "send the others before start_weight_update"
            )
        super().start_weight_update()

    def start_draft_weight_update(self) -> None:
        self._weights.refuse_if_packed()
        super().start_draft_weight_update()
