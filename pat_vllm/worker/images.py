"""Images and videos of requests, and what towers keep of them, in a worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.runners import is_v2

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    from pat_vllm.executor.messages import EncoderInputs
    from pat_vllm.worker.runtime import ModelRunner


def without_data(features: Iterable[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
    """The places and names of images alone, for ranks that get the data when they need it."""
    return [replace(feature, data=None) for feature in features]


def put_encoder_inputs(runner: ModelRunner, inputs: EncoderInputs) -> None:
    """Give requests that a Model Runner V1 knows data of images."""
    assert not is_v2(runner), "a step brings Model Runner V2 all data that it lacks"
    for request_id, data in inputs.items():
        features = runner.requests[request_id].mm_features
        for index, item in data.items():
            features[index] = replace(features[index], data=item)


def clear_deepstack(runner: ModelRunner) -> None:
    """Make what a class keeps of images for its deeper layers zero, as text has to find it.

    It is in the pool of weights, which sleep may discard, and vLLM keeps registered buffers only.
    """
    model: Any = runner.get_model()
    for level in getattr(model, "deepstack_input_embeds", ()):
        level.zero_()
