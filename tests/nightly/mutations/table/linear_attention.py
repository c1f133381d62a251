# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in what PAT knows of linear attention: its slots, weights, blocks and costs."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/vllm/kv_transfer/test_slots.py": [
        ("keys are where queries are", "models.kinds:LinearAttention.segments", "start + heads * sum(widths[:i])", "start"),
        ("x comes after B and C", "models.kinds:_parts_of_slot", "_ROWS[spec.mamba_type.name]", '_ROWS["GDN_ATTN"]'),
        ("a slot counts what one rank has", "models.kinds:LinearAttention.of", " * heads // _key_heads(spec)", ""),
        ("key heads are repeated", "models.kinds:LinearAttention.heads_of", "self.heads % layout.tp", "False"),
    ],
    "tests/engine/test_linear_attention.py::test_states_are_the_sources_byte_for_byte": [
        ("a segment moves for all", "kv_transfer.connector:PATConnector._views", "(view.storage_offset(), view.shape,", "(view.shape,"),
    ],
    "tests/engine/v2/test_drafters.py::test_linear_attention_goes_on_from_the_last_accepted_token": [
        ("a switch takes the state of the first token that a step verified", "worker.worker:PATWorkerMixin.pat_switch", "self._state_transfer.settle(source.runner, command.placement)", "pass"),
    ],
    "tests/vllm/worker/test_linear_states.py": [
        ("the convolution goes on behind refused drafts", "worker.linear_states:settle", "inputs + accepted[some, None]", "inputs"),
        ("the matrix has not seen accepted drafts", "worker.linear_states:settle", "(first + accepted)[some]", "first[some]"),
        ("drafts never reach into another block", "worker.linear_states:settle", "((accepted > 0) | (first != last))", "(accepted > 0)"),
    ],
    "tests/vllm/patches/test_mamba2.py": [
        ("a part of a prompt comes before requests that decode", "patches.linear_attention:_shortest_first", "0 if drafts.get(name) else num_tokens[name]", "0"),
    ],
    "tests/unit/models/test_kinds.py": [
        ("drafts take no slots", "models.kinds:LinearAttention.most_blocks", "most + self.drafts", "most"),
        ("a drafter has a state where a hit has its last block", "models.kinds:LinearAttention.needed", "blocks - self.dropped", "blocks"),
    ],
    "tests/vllm/weights/test_weights.py": [
        ("steps of heads have no rule", "weights.cuts:known_cuts", '("A", "D", "dt_bias")', '("A", "D")'),
        ("the gated norm is cut in two parts", "weights.cuts:_partition", "EvenPartition((module.full_hidden_size,))", "EvenPartition((module.full_hidden_size // 2,) * 2)"),
        ("a convolution has no memory when it gets its shape", "weights.inplace:InPlaceShards.building", "last.nbytes <= _SMALL", "False"),
    ],
})
# fmt: on
