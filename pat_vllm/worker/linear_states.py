"""Where a request's state of linear attention lies when drafts have been verified: see `settle`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

_COPIED = 64 << 20
"""Bytes of a layer's states that are copied at once."""


def has_slots_for_drafts(runner: RunnerV2) -> bool:
    """Whether there is something to `settle`."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    has_states = isinstance(runner.model_state, MambaHybridModelState)
    return has_states and runner.speculative_config is not None


def settle(runner: RunnerV2, request_ids: Iterable[str]) -> None:
    """Put the state of each of these requests where it is without drafts. No step is in flight.

    A step that verifies drafts leaves the state of each of its tokens in a slot of its own, and in
    the first slot the inputs of the convolution for all of them. Which of them was accepted last,
    and so which state is the request's, only the runner knows; with prefix caching also in which
    block the first slot is: drafts may reach into the next one, and be refused. Another runner goes
    on from the slot of the last computed token, and takes that for the state of it.

    Each rank does it for its heads. A request's slots are its own; that of a whole block, which
    others may read, has this very state already.
    """
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    states = runner.model_state
    assert isinstance(states, MambaHybridModelState)
    known = runner.req_states.req_id_to_index
    rows = torch.tensor(
        [known[id_] for id_ in request_ids if id_ in known], dtype=torch.long, device=runner.device
    )
    accepted = states.num_accepted_tokens_gpu[rows].long() - 1
    first = last = torch.zeros_like(rows)
    layers = runner.vllm_config.compilation_config.static_forward_context
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not isinstance(spec, MambaSpec):
            continue
        if spec.mamba_cache_mode == "align":
            first = states._mamba_state_idx_gpu[rows].long()
            last = (runner.req_states.num_computed_tokens.gpu[rows].long() - 1) // spec.block_size
        moved = ((accepted > 0) | (first != last)).nonzero().flatten()
        table = runner.block_tables.block_tables[index].gpu[rows].long()
        for some in moved.split(max(1, _COPIED // spec.page_size_bytes)):
            each = torch.arange(len(some), device=runner.device)
            of_first, of_last = table[some][each, first[some]], table[some][each, last[some]]
            own = table[some][each, (first + accepted)[some]]
            for name in group.layer_names:
                convolution, matrix = layers[name].kv_cache
                matrix[of_last] = matrix[own]
                inputs = torch.arange(convolution.shape[1], device=runner.device)
                inputs = (inputs + accepted[some, None]).clamp(max=len(inputs) - 1)
                convolution[of_last] = convolution[of_first[:, None], inputs]
