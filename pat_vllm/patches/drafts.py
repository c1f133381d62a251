"""What PAT does to vLLM's drafters and to its verification of drafts, in the workers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pat_vllm.models.drafters import has_weights
from pat_vllm.patches.replacing import replace, replaced
from pat_vllm.patches.runners import is_v2

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1


def prepare_drafter(runner: RunnerV1 | RunnerV2) -> None:
    """Have a runner that speculates draft as PAT needs it: see what this calls."""
    config = runner.speculative_config
    if config is None:
        return
    take_every_draft_length(runner)
    draft_near_the_longest_context(runner)
    end_thinking_in_own_rows(runner)
    if has_weights(config):
        name_drafter(runner)
    else:
        skip_empty_drafts(runner)


def name_drafter(runner: RunnerV1 | RunnerV2) -> None:
    """Have a Model Runner V2 with a drafter of weights call it `drafter`, too, as V1 does.

    Without it: VeRL, NeMo-RL, SkyRL and ROLL, which look for `runner.drafter.model`, find none.
    They update the target alone, most of them silently. Missing seam: they do not ask
    `get_draft_model`, which both runners have.
    """
    if is_v2(runner):
        runner.drafter = runner.speculator  # type: ignore[attr-defined]


def share_with_target(shared: Mapping[str, bool], use_v2: bool) -> AbstractContextManager[None]:
    """Inside, have drafters of this model runner share modules with their target as told.

    Without it: vLLM goes by flags that only reading a checkpoint sets, and then compares values.
    Another layout's drafter has read none, and its shards have no values yet: a head of its own
    would be replaced by the target's. Missing seam: a loader that is given the answer.

    Args:
        shared: by vLLM's flag that a drafter has the module itself, such as `has_own_lm_head`.
    """

    def should_share(drafter: Any, flag: str, *modules: Any) -> bool:
        if hasattr(drafter, flag):
            setattr(drafter, flag, not shared[flag])
        return shared[flag]

    if not use_v2:
        return _sharing_of_v1(should_share)
    import vllm.v1.worker.gpu.spec_decode.eagle.utils as utils

    return replaced(utils, "_should_share", should_share)


@contextmanager
def _sharing_of_v1(should_share: Callable[[Any, str], bool]) -> Iterator[None]:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    share_embeddings, share_head = Proposer._maybe_share_embeddings, Proposer._maybe_share_lm_head

    def embeddings(proposer: Proposer, target: Any) -> None:
        if should_share(proposer.model, "has_own_embed_tokens"):
            share_embeddings(proposer, target)

    def head(proposer: Proposer, target: Any) -> None:
        if not should_share(proposer.model, "has_own_lm_head"):
            # vLLM does more here than to share. It compares with a head only if there is one.
            target = SimpleNamespace(model=target.model)
        share_head(proposer, target)

    with (
        replaced(Proposer, "_maybe_share_embeddings", embeddings),
        replaced(Proposer, "_maybe_share_lm_head", head),
    ):
        yield


def use_drafter(runner: RunnerV1 | RunnerV2, drafter: Any) -> None:
    """Have a runner draft by this in the place of vLLM's n-gram drafter, before it is prepared.

    Without it: drafts come from a request's own text alone. Missing seam: vLLM's `custom_class`
    takes a drafter for Model Runner V1 only, and by a method that switches V2 off.
    """
    setattr(runner, "speculator" if is_v2(runner) else "drafter", drafter)


def draft_beside(runner: RunnerV2, other: Any) -> None:
    """Have a runner with a drafter of weights draft by another one, too: by `other.propose`, which
    is given vLLM's own, and `other.forget`, when all requests have left.

    Without it: a drafter with weights is the only one. Missing seam: vLLM has one drafter.
    """
    replace(runner.speculator, "propose", other.propose)
    runner.speculator.forget = other.forget  # type: ignore[union-attr]


def tokens_on_device(wanted: bool) -> AbstractContextManager[None]:
    """Inside, if `wanted`, make Model Runners V2 keep the tokens of their requests on the device.

    Without it: vLLM does so for n-gram drafts alone. Text that is looked up beside another drafter
    would be read over the bus. Missing seam: the runner takes no option for it.
    """
    if not wanted:
        return nullcontext()
    import vllm.v1.worker.gpu.model_runner as model_runner

    states = model_runner.RequestState

    def make(*args: Any, **options: Any) -> Any:
        return states(*args, **{**options, "use_dense_all_token_ids": True})

    return replaced(model_runner, "RequestState", make)


def skip_empty_drafts(runner: RunnerV1 | RunnerV2) -> None:
    """Have a runner with an n-gram drafter make a step of draft length 0 as without a drafter.

    Without it: Model Runner V1 looks for n-grams and samples through the rejection sampler in such
    a step, too; V2 looks for as many drafts as in any other step and masks them. Missing seam:
    vLLM tells the drafter the length, not the runner whether to draft.
    """
    config = runner.speculative_config
    assert config is not None
    if is_v2(runner):
        replace(runner.speculator, "propose", functools.partial(_propose, runner.speculator))
    elif config.method == "ngram":  # "ngram_gpu" keeps tokens of its own, which it has to update

        def execute(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(step: SchedulerOutput, *args: Any, **options: Any) -> Any:
                drafts = step.scheduled_spec_decode_tokens or step.num_spec_tokens_to_schedule
                samples = step.total_num_scheduled_tokens > 0
                runner.speculative_config = config if drafts or not samples else None
                return original(step, *args, **options)

            return call

        def sample(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                try:
                    return original(*args, **options)
                finally:
                    runner.speculative_config = config

            return call

        replace(runner, "execute_model", execute)
        replace(runner, "sample_tokens", sample)


def _propose(speculator: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(input_batch: Any, *args: Any, **options: Any) -> Any:
        if options.get("num_speculative_tokens") == 0 and not options.get("dummy_run"):
            return speculator.drafts[: input_batch.num_reqs]  # which the runner masks
        return original(input_batch, *args, **options)

    return call


def take_every_draft_length(runner: RunnerV1 | RunnerV2) -> None:
    """Have a runner serve every draft length that its config names.

    Without it: the drafter "ngram_gpu" of Model Runner V1 fails in a step of another draft length
    than the longest. V2 captures no graphs for the longest ones where a layout runs fewer requests
    at once than there are draft lengths, and looks among the graphs of one size only, which need
    not have the step's draft length. Missing seam: vLLM takes the lengths from a schedule by number
    of requests.
    """
    config = runner.speculative_config
    assert config is not None
    if is_v2(runner):
        import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils

        replace(cudagraph_utils, "build_dynamic_sd_schedule_lookup", _look_up_all)
        if has_weights(config):
            from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import (
                cudagraph_utils as of_drafters,
            )

            replace(of_drafters, "build_dynamic_sd_schedule_lookup", _look_up_all)
        replace(cudagraph_utils.CudaGraphManager, "_init_candidates", _find_all)
    elif config.method == "ngram_gpu":
        replace(runner.drafter, "propose", functools.partial(_propose_some, runner.drafter))


def _look_up_all(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def call(schedule: Sequence[Any], vllm_max_batch_size: int, **options: Any) -> list[int]:
        return original(schedule, max(vllm_max_batch_size, len(schedule)), **options)

    return call


def _find_all(original: Callable[..., None]) -> Callable[..., None]:
    def call(manager: CudaGraphManager) -> None:
        original(manager)
        for graphs in manager._capture_descs.values():
            graphs[:] = _worth_capturing(graphs, manager.decode_query_len)
        for key in manager._candidates:
            manager._candidates[key] = _smallest_graphs(manager, *key)

    return call


def _worth_capturing(
    graphs: Sequence[BatchExecutionDescriptor], longest: int
) -> list[BatchExecutionDescriptor]:
    """The graphs to keep for some drafts, but not the most: for batches with a graph for none.

    And the largest of each length. There is a size for nearly each batch otherwise, and so a graph
    of each length: eight times as many as without speculation.
    """
    batches = {graph.num_reqs for graph in graphs if graph.uniform_token_count == 1}
    kept: list[BatchExecutionDescriptor] = []
    seen: set[int | None] = {None, 1, longest}
    for graph in graphs:  # the largest comes first
        length = graph.uniform_token_count
        if length not in seen or length in (None, 1, longest) or graph.num_reqs in batches:
            kept.append(graph)
        seen.add(length)
    return kept


def _smallest_graphs(
    manager: CudaGraphManager, num_tokens: int, num_active_loras: int
) -> list[BatchExecutionDescriptor]:
    """Each kind's smallest graph for so many tokens; kinds for fewer steps come first."""
    kinds: dict[Any, BatchExecutionDescriptor] = {}
    for graphs in manager._capture_descs.values():
        for graph in graphs:  # the largest comes first
            if graph.num_tokens >= num_tokens and graph.num_active_loras == num_active_loras:
                length = graph.uniform_token_count or math.inf
                kinds[-graph.cg_mode.value, length, graph.num_ubatches] = graph
    return [kinds[kind] for kind in sorted(kinds)]


def _propose_some(drafter: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(num_speculative_tokens: int, *args: Any, **options: Any) -> Any:
        drafts, num_valid = original(drafter.k, *args, **options)
        return drafts[:, :num_speculative_tokens], num_valid.clamp(max=num_speculative_tokens)

    return call


def draft_near_the_longest_context(runner: RunnerV1 | RunnerV2) -> None:
    """Have Model Runner V1's drafter go on where a request comes near `max_model_len`.

    Without it: as soon as one request of a step does, V1 gives zeros for drafts to all of them, on
    CPU by a CUDA stream, which ends the engine. The KV of a drafter with weights then has gaps,
    for all, which nothing fills. The n-gram drafter has no KV, and proposes nothing beyond
    `max_model_len` itself. One with weights has its passes beyond that at position 0, without a
    place for KV; but the pass after such a one would be at position 1, and write there. vLLM 0.33
    does so, too. Missing seam: vLLM does not ask the drafter. This goes with Model Runner V1.
    """
    assert runner.speculative_config is not None
    if is_v2(runner) or runner.speculative_config.method == "ngram_gpu":
        return
    replace(runner, "_input_fits_in_drafter", lambda original: _is_attended)
    if has_weights(runner.speculative_config):
        replace(runner.drafter, "_update_positions_dependent_metadata", _count_beyond)


def _count_beyond(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(positions: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        original(positions, *args, **options)  # returns positions that begin again
        return positions + 1

    return call


def end_thinking_in_own_rows(runner: RunnerV1 | RunnerV2) -> None:
    """Have a Model Runner V1 force the phrase that ends thinking in a step without drafts, too.

    Without it: with a drafter, vLLM counts a request's rows of logits by its drafts. In a step
    without any, each request has none by that, and the first request of the batch gets the tokens
    that all others are to get; a draft length of 0 makes many such steps. vLLM 0.33 does so, too.
    Missing seam: a sampler that tells the processor whether it verifies drafts. This goes with
    Model Runner V1.
    """
    if is_v2(runner):
        return

    def sample(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(logits: Any, spec_decode_metadata: Any, *args: Any, **options: Any) -> Any:
            if (holder := runner.input_batch.thinking_budget_state_holder) is not None:
                holder.in_spec_mode = spec_decode_metadata is not None
            return original(logits, spec_decode_metadata, *args, **options)

        return call

    replace(runner, "_sample", sample)


def _is_attended(common_attn_metadata: Any) -> bool:
    return common_attn_metadata is not None


def verify_sampled_drafts() -> None:
    """Have Model Runner V1 verify drafts on CPU by their requests' temperature, top-k and top-p.

    Without it: vLLM's C++ writes these parameters of each draft token into a copy that nobody reads
    (vLLM issue 55005), so that drafts are verified by whatever lies in the memory, also those of
    greedy requests beside sampled ones. And where no request of a step has a draft, as in a
    prefill, top-k fails. vLLM 0.33 has both mistakes, too. Missing seam: vLLM's registry of kernels
    would do for the first, but complains in each worker of a kernel that is registered again. This
    goes when that issue is closed.
    """
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    def constraining(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def apply(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return original(logits, *args, **options) if len(logits) else logits

        return apply

    replace(rejection_sampler, "expand_batch_to_tokens", lambda original: _of_each_token)
    replace(rejection_sampler, "apply_sampling_constraints", constraining)


def _of_each_token(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """A value [requests] for each token [tokens]; `cu_num_tokens` [requests] counts up to them."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    of_tokens = x.repeat_interleave(counts, output_size=num_tokens)
    return of_tokens.masked_fill(of_tokens == replace_from, replace_to)
