"""Weights are read from disk once, for the base layout; the other layouts' are derived in memory.

vLLM's own model loaders do the work, through its `register_model_loader`. A runner whose load
format is `BASE_FORMAT` loads as the user asked and hands its plain parameters to a
`WeightStrategy`; with `DERIVED_FORMAT` it builds its model and has the strategy fill it. Both
happen before vLLM's `process_weights_after_loading`, which may pack the parameters for its kernels
and free the plain ones (it does on CPU). The strategies are `InPlaceShards` (`inplace.py`) and
`MaterializedShards` (`materialized.py`); `worker/layout_weights.py` chooses one and calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.config.utils import replace, update_config
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from pat_vllm.layout import Layout
from pat_vllm.patches.compat import external_weight_memory
from pat_vllm.patches.weights import kept_input_norms, tie_word_embeddings
from pat_vllm.weights.drafter import Drafter, is_drafters
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.weights.weight import Weight

BASE_FORMAT = "pat-base"
DERIVED_FORMAT = "pat-derived"


class WeightStrategy(ABC):
    """Where the weights of the layouts other than the base layout come from.

    A rank's shard in the base layout contains its shards in all others (see `Layout`). At a start
    the loaders below call `check` and `capture` for the base layout, `building` and `fill` for each
    other. `LayoutWeights` calls `release` after that, `arrange` at switches, `refresh` at updates.
    A drafter with weights has a strategy of its own, of the same class.
    """

    _dropped: Collection[str] = ()
    """Names of weights that models have only until vLLM has loaded them."""

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if the weights of `model` cannot be derived. Reads no values."""
        for _ in model_weights(model):
            pass

    @abstractmethod
    def capture(self, model: nn.Module) -> None:
        """Take the loaded, not yet processed weights of the base layout's model."""

    def building(self) -> AbstractContextManager[None]:
        """Context in which the model of another layout is constructed; `fill` follows."""
        return nullcontext()

    @abstractmethod
    def fill(self, model: nn.Module) -> None:
        """Give the model of another layout its weights.

        Raises:
            ValueError: the model's weights are not those of the base model cut another way.
        """

    @abstractmethod
    def keep(self, modules: Collection[nn.Module]) -> None:
        """Let go of captured weights of other modules than these.

        vLLM has replaced those, and will in the models to be filled, where they are left alone.
        """

    def _kept(
        self, captured: Mapping[str, Weight], modules: Collection[nn.Module]
    ) -> dict[str, Weight]:
        kept = {name: weight for name, weight in captured.items() if weight.module in modules}
        self._dropped = captured.keys() - kept.keys()
        return kept

    def kept_weights(self, model: nn.Module) -> Iterator[Weight]:
        """The weights of a model, without those that are dropped."""
        return (weight for weight in model_weights(model) if weight.name not in self._dropped)

    @abstractmethod
    def release(self) -> None:
        """Let go of what only loading needs, when all layouts are filled and processed by vLLM.

        Raises:
            ValueError: the processing has made the weights unfit for this strategy.
        """

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device's memory that `arrange` takes while it runs. After `release`."""
        return 0

    @abstractmethod
    def refresh(self, base: nn.Module, others: Iterable[nn.Module]) -> None:
        """Give the other layouts the base layout's weights again, which may have changed."""

    def arrange(self, layout: Layout) -> int:
        """Put the weights of a layout in place.

        To be called before that layout's model runs. Before new weights arrive, it is called for
        the base layout.

        Returns:
            Bytes of weights that were moved on this rank.
        """
        return 0


def load_config_of(
    load_format: str,
    user: LoadConfig,
    strategy: WeightStrategy,
    of_drafter: WeightStrategy | None = None,
) -> LoadConfig:
    """Load configuration of the base layout (`BASE_FORMAT`), or of any other (`DERIVED_FORMAT`).

    Args:
        user: the engine's, by which the base layout's weights are read.
        strategy, of_drafter: for the target's weights, and for those of a drafter.
    """
    extra = {"strategy": strategy, "of_drafter": of_drafter, "user": user}
    return replace(user, load_format=load_format, model_loader_extra_config=extra)


def change_user_config(config: LoadConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Translate overrides of the user's load configuration to overrides of PAT's around it.

    Args:
        config: PAT's, as `load_config_of` makes it.
        overrides: values by field, as vLLM's `update_config` takes them.
    """
    extra = config.model_loader_extra_config
    user = update_config(extra["user"], overrides)
    return {"model_loader_extra_config": {**extra, "user": user}}


class _LayoutLoader(BaseModelLoader):
    """What loads the target of a layout, or its drafter."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config
        self.strategy: WeightStrategy = extra["strategy"]
        self.of_drafter: WeightStrategy | None = extra["of_drafter"]

    def strategy_for(self, model_config: ModelConfig | None) -> WeightStrategy:
        """The strategy for the weights of the model that is loaded by this config."""
        if not is_drafters(model_config):
            return self.strategy
        assert self.of_drafter is not None, "a drafter that nobody has foreseen"
        return self.of_drafter


@register_model_loader(BASE_FORMAT)
class BaseLayoutLoader(_LayoutLoader):
    """Loads with the loader that the user asked for, and captures what it loaded.

    Raises:
        ValueError: that loader does not go through vLLM's `load_weights`.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        user: LoadConfig = load_config.model_loader_extra_config["user"]
        self.loader: BaseModelLoader = get_model_loader(user)
        if type(self.loader).load_model is not BaseModelLoader.load_model:
            raise ValueError(
                f"load_format {user.load_format!r} does not hand over plain weights, which PAT "
                "needs to derive those of its other layouts. Use auto, safetensors, pt or dummy."
            )

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        return external_weight_memory(self.loader, vllm_config)

    def download_model(self, model_config: ModelConfig) -> None:
        self.loader.download_model(model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the weights again, for vLLM's `reload_weights`.

        Raises:
            NotImplementedError: the user's loader cannot read weights again.
        """
        if not hasattr(self.loader, "get_all_weights"):
            load_format = self.loader.load_config.load_format
            raise NotImplementedError(
                f"Model reloading with `{load_format}` format. Choose another load_format first, "
                'by update_config({"load_config": {"load_format": "auto"}}).'
            )
        return self.loader.get_all_weights(model_config, model)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        strategy, named = self.strategy_for(model_config), _named(model, model_config)
        # An unsupported model should fail before its weights are read, which may take minutes.
        strategy.check(named)
        with kept_input_norms(model):
            self.loader.load_weights(model, model_config)
        tie_word_embeddings(model, model_config)
        strategy.capture(named)


@register_model_loader(DERIVED_FORMAT)
class DerivedLayoutLoader(_LayoutLoader):
    """Fills the model from the base layout's weights; touches no file."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        with self.strategy_for(model_config).building():
            return super().create_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.strategy_for(model_config).fill(_named(model, model_config))


def _named(model: nn.Module, model_config: ModelConfig | None) -> nn.Module:
    """A model whose weights have the names by which strategies know them."""
    return Drafter(model) if is_drafters(model_config) else model
