"""The weights of a worker's layouts: how they are loaded, where they lie, how they are renewed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention

from pat_vllm.executor.messages import Refreshed
from pat_vllm.models.drafters import has_weights
from pat_vllm.patches.runners import is_v2
from pat_vllm.patches.weights import after_load_weights, refuse_load_weights
from pat_vllm.weights.drafter import Drafter, shared_names, sharing_as
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.kv_scales import kv_scales, share_kv_scales
from pat_vllm.weights.loaders import BASE_FORMAT, DERIVED_FORMAT, WeightStrategy, load_config_of
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.opened_reload import OpenedReload

if TYPE_CHECKING:
    from pat_vllm.layout import Layout
    from pat_vllm.start.setup import Setup
    from pat_vllm.worker.runtime import LayoutRuntime, ModelRunner


class LayoutWeights:
    """The weights of one rank, in the base layout and in those derived from it.

    Of the target, and of the drafter if that has weights: each has a strategy.

    Attributes:
        drafter_is_stale: whether the target's weights have been updated since the drafter's were.
    """

    drafter_is_stale = False
    _reload: OpenedReload | None = None  # until weights are loaded
    _of_drafter: WeightStrategy | None = None
    _updated: frozenset[str] = frozenset()
    """The models that weights have been loaded into since the last `refresh`."""

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

        def make() -> WeightStrategy:
            if setup.weights == "inplace":
                return InPlaceShards(tuple(runtimes), rank, setup.experts or "tp")
            return MaterializedShards()

        self._strategy = make()
        if has_weights(self._base.config.speculative_config):
            self._of_drafter = make()
        self._packed = False
        for runtime in self._runtimes:
            how = BASE_FORMAT if runtime is self._base else DERIVED_FORMAT
            runtime.config.load_config = load_config_of(
                how, runtime.config.load_config, self._strategy, self._of_drafter
            )

    @property
    def strategy(self) -> Literal["inplace", "materialized"]:
        """The option `weights`, resolved."""
        return "inplace" if isinstance(self._strategy, InPlaceShards) else "materialized"

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device's memory that `arrange` takes while it runs."""
        return max(strategy.staging_bytes for strategy in self._strategies())

    @contextmanager
    def loading_into(self, runtime: LayoutRuntime) -> Iterator[None]:
        """Inside, vLLM loads the models of a layout, the base layout's first."""
        if self._of_drafter is None:
            yield
            return
        base = self._base.runner
        if runtime is not self._base:
            with sharing_as(_drafter_of(base), base.get_model(), is_v2(base)):
                yield
            return
        yield
        own = set(self._drafter(runtime).modules())
        # A captured embedding or head that vLLM has replaced would stay in memory.
        self._of_drafter.keep(own)

    def _models(self) -> Iterator[tuple[WeightStrategy, list[nn.Module]]]:
        """Each strategy with the models of its layouts, the base layout's first."""
        yield self._strategy, [runtime.runner.get_model() for runtime in self._runtimes]
        if self._of_drafter is not None:
            yield self._of_drafter, [self._drafter(runtime) for runtime in self._runtimes]

    def _drafter(self, runtime: LayoutRuntime) -> Drafter:
        return Drafter(_drafter_of(runtime.runner), runtime.runner.get_model())

    def finish_loading(self) -> None:
        """Free what only loading needed. Guard weights that cannot be updated against updates.

        Raises:
            ValueError: vLLM has made the weights unfit for the `weights` option, or layouts cannot
                share the scales of the KV cache.
        """
        for strategy in self._strategies():
            strategy.release()
        self._kv_scales = self._share_kv_scales()
        for strategy, (base, *_) in self._models():
            try:
                strategy.check(base)
            except ValueError:
                self._packed = len(self._runtimes) > 1
        target = self._base.runner.get_model()
        trained = {"target": target}
        if self._of_drafter is not None:
            trained["drafter"] = _drafter_of(self._base.runner)
        for name, model in trained.items():
            if self._packed:
                refuse_load_weights(model, self.refuse_if_packed)
            elif len(trained) > 1:
                shared = frozenset() if model is target else shared_names(model, target)
                after_load_weights(model, partial(self._note_update, name, shared))
        if not self._packed:
            self._reload = OpenedReload(target, self._base.config)

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

    def finish_update(self) -> bool:
        """Put what has been loaded in place. In the base layout; before `refresh`.

        Returns:
            Whether it is done. It is not while only some weights of a quantized layer have come.
        """
        assert self._reload is not None
        if self._reload.incomplete is None:
            self._reload.close()
        return not self._reload.is_open

    def arrange(self, layout: Layout) -> int:
        """Before `layout` runs, or new weights come to the base layout: put its rows in place.

        Returns:
            Bytes that came to another place.
        """
        return sum(strategy.arrange(layout) for strategy in self._strategies())

    def _strategies(self) -> Iterator[WeightStrategy]:
        return filter(None, (self._strategy, self._of_drafter))

    def refresh(self, active: Layout) -> Refreshed:
        """Give every other layout the base layout's weights; then put those of `active` in place.

        Collective over all ranks.

        Returns:
            Whether it is done. It is not while vLLM takes new weights in layer by layer, from
            `start_weight_update` on: the base layout's model has none where they are missing.
        """
        if len(self._runtimes) == 1 or self._packed:
            self._look_for_stale_drafter()
            return Refreshed.DONE
        every = list(self._models())
        # Attention layers have buffers only, which come back with the finish.
        tensors = (chain(base.parameters(), base.buffers()) for _, (base, *_) in every)
        if any(tensor.is_meta for tensor in chain.from_iterable(tensors)):
            return Refreshed.MISSING
        self._look_for_stale_drafter()
        for strategy, (base, *others) in every:
            strategy.refresh(base, others)
            for model in (base, *others):
                renew_absorbed(model)
        self.arrange(active)
        before, self._kv_scales = self._kv_scales, self._share_kv_scales()
        same = before == self._kv_scales
        return Refreshed.DONE if same else Refreshed.WITH_OTHER_KV_SCALES

    def _note_update(self, model: str, shared: frozenset[str], loaded: Any) -> None:
        """Note that a model has loaded weights: not only shared ones, which its target has, too.

        Args:
            loaded: names, as vLLM's classes return them; None: the class does not tell.
        """
        if loaded is None or not shared.issuperset(loaded):
            self._updated |= {model}

    def _look_for_stale_drafter(self) -> None:
        """Look which models have been updated since the last time."""
        if self._updated:
            self.drafter_is_stale = "drafter" not in self._updated
            self._updated = frozenset()

    def _share_kv_scales(self) -> list[float]:
        """Give every layout the base layout's scales of the KV cache, and return them."""
        scales = []
        for _, (base, *others) in self._models():
            for model in others:
                share_kv_scales(model, base)
            scales += kv_scales(base)
        return scales


def _drafter_of(runner: ModelRunner) -> nn.Module:
    """The model of a runner's drafter."""
    model = runner.get_draft_model()
    assert isinstance(model, nn.Module)
    return model


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
