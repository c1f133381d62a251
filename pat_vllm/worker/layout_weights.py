"""The weights of a worker's layouts: how they are loaded, where they lie, how they are renewed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention

from pat_vllm.executor.messages import Refreshed
from pat_vllm.patches.weights import refuse_load_weights
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.kv_scales import kv_scales, share_kv_scales
from pat_vllm.weights.loaders import BASE_FORMAT, DERIVED_FORMAT, WeightStrategy, load_config_of
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.opened_reload import OpenedReload

if TYPE_CHECKING:
    from pat_vllm.layout import Layout
    from pat_vllm.start.setup import Setup
    from pat_vllm.worker.runtime import LayoutRuntime


class LayoutWeights:
    """The weights of one rank, in the base layout and in those derived from it."""

    _reload: OpenedReload | None = None  # until weights are loaded

    def __init__(
        self,
        setup: Setup,
        runtimes: Mapping[Layout, LayoutRuntime],
        rank: int,
    ) -> None:
        """Have each layout's model loaded in PAT's way.

        Args:
            setup: the engine's.
            runtimes: the base layout first. Their model runners are not made yet.
            rank: the global rank of this worker.
        """
        self._runtimes = tuple(runtimes.values())
        self._base = self._runtimes[0]
        self._strategy: WeightStrategy = MaterializedShards()
        if setup.weights == "inplace":
            self._strategy = InPlaceShards(tuple(runtimes), rank, setup.experts or "tp")
        self._packed = False
        for runtime in self._runtimes:
            how = BASE_FORMAT if runtime is self._base else DERIVED_FORMAT
            runtime.config.load_config = load_config_of(
                how, runtime.config.load_config, self._strategy
            )

    @property
    def strategy(self) -> Literal["inplace", "materialized"]:
        """The option `weights`, resolved."""
        return "inplace" if isinstance(self._strategy, InPlaceShards) else "materialized"

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device's memory that `arrange` takes while it runs."""
        return self._strategy.staging_bytes

    def finish_loading(self) -> None:
        """Free what only loading needed. Guard weights that cannot be updated against updates.

        Raises:
            ValueError: vLLM has made the weights unfit for the `weights` option, or layouts cannot
                share the scales of the KV cache.
        """
        self._strategy.release()
        model = self._base.runner.get_model()
        self._kv_scales = self._share_kv_scales()
        try:
            self._strategy.check(model)
        except ValueError:
            self._packed = len(self._runtimes) > 1
        if self._packed:
            refuse_load_weights(model, self.refuse_if_packed)
        else:
            self._reload = OpenedReload(model, self._base.config)

    def refuse_if_packed(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError if new weights could not be given to all layouts."""
        if self._packed:
            raise RuntimeError(
                "the weights of this engine cannot be updated: vLLM has packed them for its CPU "
                "kernels and freed the plain ones, from which those of the layouts "
                f"{', '.join(str(r.layout) for r in self._runtimes)} are derived. Updates need "
                "a GPU, or one layout: pat.layouts=[N] with pat.base_tp=N."
            )

    @property
    def loading(self) -> bool:
        """Whether a trainer's weights wait for `finish_update`."""
        return self._reload is not None and self._reload.is_open

    def finish_update(self) -> None:
        """Put what has been loaded in place. In the base layout; before `refresh`."""
        assert self._reload is not None
        self._reload.close()

    def arrange(self, layout: Layout) -> int:
        """Before `layout` runs, or new weights come to the base layout: put its rows in place.

        Returns:
            Bytes that came to another place.
        """
        return self._strategy.arrange(layout)

    def refresh(self, active: Layout) -> Refreshed:
        """Give every other layout the base layout's weights; then put those of `active` in place.

        Collective over all ranks.

        Returns:
            Whether it is done. It is not while vLLM takes new weights in layer by layer, from
            `start_weight_update` on: the base layout's model has none where they are missing.
        """
        if len(self._runtimes) == 1 or self._packed:
            return Refreshed.DONE
        base, *others = (runtime.runner.get_model() for runtime in self._runtimes)
        # Attention layers have buffers only, which come back with the finish.
        if any(tensor.is_meta for tensor in chain(base.parameters(), base.buffers())):
            return Refreshed.MISSING
        self._strategy.refresh(base, others)
        for model in (base, *others):
            renew_absorbed(model)
        self._strategy.arrange(active)
        before, self._kv_scales = self._kv_scales, self._share_kv_scales()
        same = before == self._kv_scales
        return Refreshed.DONE if same else Refreshed.WITH_OTHER_KV_SCALES

    def _share_kv_scales(self) -> list[float]:
        """Give every layout the base layout's scales of the KV cache, and return them."""
        base, *others = (runtime.runner.get_model() for runtime in self._runtimes)
        for model in others:
            share_kv_scales(model, base)
        return kv_scales(base)


@torch.no_grad()
def renew_absorbed(model: nn.Module) -> None:
    """Have vLLM make latent attention's `W_UV` and `W_UK_T` anew of weights that have changed.

    They are parts of `kv_b_proj`, by which queries and outputs are multiplied in a decode step in
    place of each token's keys and values, and stay where they lie. Of unquantized weights they are
    views of it, and nothing is to be done. What a switch moves is not among these weights: a
    layout's heads are a range of the base layout's.
    """
    for module in model.modules():
        if isinstance(module, MLAAttention):
            source = module.kv_b_proj.weight.untyped_storage().data_ptr()
            absorbed = list(module.parameters(recurse=False))
            if any(tensor.untyped_storage().data_ptr() != source for tensor in absorbed):
                module.process_weights_after_loading(absorbed[0].dtype)
