"""Images and videos of requests, as the schedulers see them.

Nothing of a tower's outputs moves at a switch. New schedulers know of none, so that an image whose
tokens are not all computed is encoded again; a request keeps its images' data to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal import MultiModalRegistry
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pat_vllm.executor.messages import EncoderInputs


def identifiers(request: Request) -> tuple[str, ...]:
    """What tells the images of a prompt from those of another.

    They are hashes of the contents. Without prefix caching and without a processor cache vLLM makes
    none, and has a number for each image of each request, which would tell samples of one prompt
    apart: these are left out.
    """
    return tuple(
        feature.identifier
        for feature in request.mm_features
        if not feature.identifier.rpartition("-")[0].endswith(f"-{feature.modality}")
    )


def has_images(request: Request, num_tokens: int) -> bool:
    """Whether one begins within the first `num_tokens` tokens of the prompt."""
    return any(feature.mm_position.offset < num_tokens for feature in request.mm_features)


def encoder_inputs_to_send(
    step: SchedulerOutput, requests: Mapping[str, Request]
) -> EncoderInputs | None:
    """Data of the images to encode in a step that model runners of V1 lack; None: of none.

    They got it when a request was new. A switch takes none along, and what a hit in the prefix
    cache covered was not sent: if the request has to be computed again, its images are, too.
    """
    if not step.scheduled_encoder_inputs:
        return None
    inputs: EncoderInputs = {}
    for request_id, indices in step.scheduled_encoder_inputs.items():
        request = requests[request_id]
        if request.num_preemptions:  # a switch counts as one
            features = request.mm_features
            inputs[request_id] = {
                index: data for index in indices if (data := features[index].data) is not None
            }
    return inputs or None


class Budgets:
    """vLLM's `MultiModalBudget` of each layout, made once: a new scheduler asks for one."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[VllmConfig, MultiModalBudget]] = {}

    def take(
        self, vllm_config: VllmConfig, mm_registry: MultiModalRegistry, **options: Any
    ) -> MultiModalBudget:
        """The budget of a layout's config; arguments as vLLM's class has them."""
        from vllm.multimodal.encoder_budget import MultiModalBudget

        key = id(vllm_config)  # of an object that is kept beside it
        if key not in self._made:
            made = MultiModalBudget(vllm_config, mm_registry, **options)
            self._made[key] = vllm_config, made
        return self._made[key][1]
