"""What PAT does to linear attention of vLLM's models, in the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from types import MethodType
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.replacing import replace
from pat_vllm.patches.runners import is_v2

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1


def prepare_mamba2(runner: RunnerV1 | RunnerV2) -> None:
    """Have a runner whose model is loaded run Mamba2 as PAT needs it: see what this calls."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    layers = [layer for layer in runner.model.modules() if isinstance(layer, MambaMixer2)]
    end_prompts_parts_with_blocks(layers)
    if layers and is_v2(runner) and runner.speculative_config is not None:
        decode_before_prompts()
        capture_fewer_drafts()


def end_prompts_parts_with_blocks(layers: Iterable[MambaMixer2]) -> None:
    """Have vLLM compute prompts of a model with Mamba2 as it does those with Gated DeltaNet.

    Without it: a step keeps a state from within a part of a prompt, too, in one more block of the
    request. vLLM's kernels for CPU do not have that state. Missing seam: an option.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    for layer in layers:
        plain = MethodType(MambaBase.get_kv_cache_spec, layer)
        layer.get_kv_cache_spec = plain  # type: ignore[method-assign]


def decode_before_prompts() -> None:
    """Have Model Runner V2 order the requests of a step as Mamba2 needs it, where there are drafts.

    Without it: a part of a prompt that has as many tokens as a request with the most drafts comes
    before requests that decode without drafts. Mamba2 takes all that comes behind a part of a
    prompt for such parts, and these know nothing of drafts: what has accepted some in the step
    before goes on from its state before them. A draft length of 0 makes many such requests. Gated
    DeltaNet asks for each request. Missing seam: an order that knows which requests decode.
    """
    import vllm.v1.worker.gpu.model_runner as model_runner

    replace(model_runner, "sort_batch_req_ids", _shortest_first)


def _shortest_first(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def call(
        num_tokens: Mapping[str, int], drafts: Mapping[str, Sized], decode_query_len: int
    ) -> list[str]:
        ordered = original(num_tokens, drafts, decode_query_len)
        # A new request of one token is behind all others of one, as the scheduler has it.
        return sorted(ordered, key=lambda name: 0 if drafts.get(name) else num_tokens[name])

    return call


def capture_fewer_drafts() -> None:
    """Have Mamba2 take CUDA graphs of steps with fewer drafts than the most.

    Without it: vLLM, which captures graphs of each draft length, fails at the first that is not the
    longest. What is captured reads the lengths of a step as in other steps. Gated DeltaNet takes
    them. Missing seam: none is needed.
    """
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder

    replace(BaseMambaAttentionMetadataBuilder, "build_for_cudagraph_capture", _as_with_the_most)


def _as_with_the_most(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(builder: Any, metadata: CommonAttentionMetadata) -> Any:
        most = 1 + builder.num_spec_tokens
        if metadata.max_query_len < most:
            metadata = metadata.replace(max_query_len=most)
        return original(builder, metadata)

    return call
