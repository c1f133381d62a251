"""What PAT does to linear attention of vLLM's models, in the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from types import MethodType
from typing import TYPE_CHECKING

from pat_vllm.patches.replacing import replace
from pat_vllm.patches.runners import is_v2

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1


def end_prompts_parts_with_blocks(model: nn.Module) -> None:
    """Have vLLM compute prompts of a model with Mamba2 as it does those with Gated DeltaNet.

    Without it: a step keeps a state from within a part of a prompt, too, in one more block of the
    request. vLLM's kernels for CPU do not have that state. Missing seam: an option.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    for layer in model.modules():
        if isinstance(layer, MambaMixer2):
            plain = MethodType(MambaBase.get_kv_cache_spec, layer)
            layer.get_kv_cache_spec = plain  # type: ignore[method-assign]


def decode_before_prompts(runner: RunnerV1 | RunnerV2) -> None:
    """Have Model Runner V2 order the requests of a step as Mamba2 needs it, where there are drafts.

    Without it: a part of a prompt that has as many tokens as a request with the most drafts comes
    before requests that decode without drafts. Mamba2 takes all that comes behind a part of a
    prompt for such parts, and these know nothing of drafts: what has accepted some in the step
    before goes on from its state before them. A draft length of 0 makes many such requests. Gated
    DeltaNet asks for each request. Missing seam: an order that knows which requests decode.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if not is_v2(runner) or runner.speculative_config is None:
        return
    import vllm.v1.worker.gpu.model_runner as model_runner

    if any(isinstance(layer, MambaMixer2) for layer in runner.model.modules()):
        replace(model_runner, "sort_batch_req_ids", _shortest_first)


def _shortest_first(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def call(
        num_tokens: Mapping[str, int], drafts: Mapping[str, Sized], decode_query_len: int
    ) -> list[str]:
        ordered = original(num_tokens, drafts, decode_query_len)
        # A new request of one token is behind all others of one, as the scheduler has it.
        return sorted(ordered, key=lambda name: 0 if drafts.get(name) else num_tokens[name])

    return call
