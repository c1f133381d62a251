"""What an engine's options come to, found out once in each of its processes.

`prepare.py` has written the front end's choices into `additional_config` before; `Setup.of` reads
them there in the front end, the engine core and the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pat_vllm.config import PATConfig
from pat_vllm.layout import Experts, Layout
from pat_vllm.modelled.gpus import Link
from pat_vllm.models.drafters import looks_into_responses
from pat_vllm.models.layer_sizes import fields_of
from pat_vllm.models.moe_config import MoEConfig
from pat_vllm.predictor.draft_schedule import draft_lengths
from pat_vllm.start.limits import Limits, layout_limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LAYOUT = "pat_layout"
"""Key in `additional_config` of a layout's copy of the engine's config: the layout's name."""
CHOSEN = "pat_chosen"
"""Key in `additional_config` of an engine's config: how its layouts were chosen, a `Chosen`."""


class Chosen(TypedDict, total=False):
    """What an engine's front end has found when it chose the layouts, for the other processes.

    Attributes:
        found: how they were chosen, in a line.
        more_room: options with which a rank has more memory for KV.
        link: what connects the GPUs, on which limits depend; None: not known.
    """

    found: str
    more_room: str
    link: Link | None


@dataclass(frozen=True)
class Setup:
    """What the options of an engine come to. Each of its processes makes this once, at its start.

    Attributes:
        options: PAT's, validated; the front end has put its choice of layouts into them.
        layouts: ascending in tp; the first is the base layout.
        default_layout: the layout in which the engine starts.
        limits: what a replica runs at once, by tp.
        draft_lengths: the draft lengths that are kept ready, ascending; empty: no speculation.
        history_bytes: memory for earlier responses, in which drafters look; 0: they do not.
        weights: the option, without "auto".
        experts: how the experts of a mixture lie in layouts with tp > 1; None: there are none.
        chosen: what the front end has found; empty where it has chosen nothing.
    """

    options: PATConfig
    layouts: tuple[Layout, ...]
    default_layout: Layout
    limits: Mapping[int, Limits]
    draft_lengths: tuple[int, ...]
    history_bytes: int
    weights: Literal["inplace", "materialized"]
    experts: Experts | None
    chosen: Chosen

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Setup:
        """Resolve the options in an engine's config.

        Raises:
            ValueError: an option, its value, and what is allowed.
        """
        options = options_of(vllm_config)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        layouts = options.resolve_layouts(ranks)
        chosen = chosen_of(vllm_config)
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        given = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        tokens_per_seq = 1 + vllm_config.num_speculative_tokens
        lengths: tuple[int, ...] = ()
        history_bytes = 0
        if speculative is not None:
            schedule = speculative.num_speculative_tokens_per_batch_size
            lengths = draft_lengths(speculative.num_speculative_tokens, schedule)
            assert speculative.method is not None
            if looks_into_responses(speculative.method, vllm_config.use_v2_model_runner):
                history_bytes = options.draft_history_bytes
        return cls(
            options,
            layouts,
            options.default_layout(layouts),
            {
                layout.tp: layout_limits(layout, given, options, tokens_per_seq, chosen.get("link"))
                for layout in layouts
            },
            lengths,
            history_bytes,
            resolve_weights(vllm_config, options),
            options.resolve_experts(mixture_of(vllm_config), layouts),
            chosen,
        )

    @property
    def base(self) -> Layout:
        """The layout in which weights are loaded."""
        return self.layouts[0]

    @property
    def max_num_seqs(self) -> int:
        """The most requests that a replica of any layout runs at once."""
        return max(limits.max_num_seqs for limits in self.limits.values())


def options_of(vllm_config: VllmConfig) -> PATConfig:
    """The validated options of an engine. A layout's copy of the config has none.

    Raises:
        ValueError: an option, its value, and what is allowed.
    """
    assert layout_name(vllm_config) is None, "options are the engine's"
    return PATConfig.parse(_additional(vllm_config).get("pat"))


def layout_name(vllm_config: VllmConfig) -> str | None:
    """The layout whose copy of an engine's config this is; None: it is an engine's own."""
    name: str | None = _additional(vllm_config).get(LAYOUT)
    return name


def chosen_of(vllm_config: VllmConfig) -> Chosen:
    """What was found when the layouts were chosen; empty: they are not chosen yet."""
    chosen: Chosen = _additional(vllm_config).get(CHOSEN, {})
    return chosen


def mixture_of(vllm_config: VllmConfig) -> MoEConfig | None:
    """The experts of an engine's model; None: it has none."""
    config = getattr(vllm_config.model_config, "hf_text_config", None)
    return None if config is None else MoEConfig.from_config(fields_of(config))


def resolve_weights(
    vllm_config: VllmConfig, options: PATConfig
) -> Literal["inplace", "materialized"]:
    """The option `weights`, without "auto"."""
    from vllm.platforms import current_platform

    if options.weights != "auto":
        return options.weights
    if getattr(vllm_config.model_config, "quantization", None) is not None:
        return "inplace"  # `weights/model_weights.py` has the kinds that can be
    # In place, some shards are columns of a larger matrix, which kernels have to accept: CUDA's
    # default ones do. On CPU, vLLM packs weights for kernels that are faster than those for plain
    # weights.
    default_kernels = vllm_config.kernel_config.linear_backend == "auto"
    return "inplace" if current_platform.is_cuda() and default_kernels else "materialized"


def _additional(vllm_config: VllmConfig) -> Mapping[str, Any]:
    additional = vllm_config.additional_config
    return additional if isinstance(additional, Mapping) else {}
