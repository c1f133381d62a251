# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in what PAT knows of linear attention: its slots, weights, blocks and costs."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/vllm/kv_transfer/test_slots.py": [
        ("keys are where queries are", "models.kinds:LinearAttention.segments", "start + heads * sum(widths[:i])", "start"),
        ("rows of the convolution have queries alone", "models.kinds:LinearAttention.segments", "row = heads * sum(widths) if", "row = heads * width if"),
        ("x comes after B and C", "models.kinds:_parts_of_slot", "_ROWS[spec.mamba_type.name]", '_ROWS["GDN_ATTN"]'),
        ("matrices lie over the convolution", "models.kinds:_parts_of_slot", "(rows * row * of_conv, 1", "(0, 1"),
        ("a key head has one value head", "models.kinds:_parts_of_slot", "each = values // _key_heads(spec)", "each = 1"),
        ("a slot counts what one rank has", "models.kinds:LinearAttention.of", " * heads // _key_heads(spec)", ""),
        ("states of drafts are served", "models.kinds:LinearAttention.serves", "            and not spec.num_speculative_blocks\n", ""),
        ("key heads are repeated", "models.kinds:LinearAttention.heads_of", "self.heads % layout.tp", "False"),
        ("blocks follow the states", "worker.layout_config:block_ratio", "{kind.ratio(layout, base) for kind in kinds if not kind.padded}", "{kind.ratio(layout, base) for kind in kinds if kind.padded}"),
    ],
    "tests/vllm/start/memory/test_linear_attention.py": [
        ("slots are never padded", "models.kinds:LinearAttention.narrow", "None if page == fills else page", "None"),
        ("layouts have blocks of several sizes", "worker.layout_config:keep_block_size", "config.cache_config.block_size = base.cache_config.block_size", "pass"),
        ("vLLM chooses the size of blocks again", "worker.layout_config:keep_block_size", "config.cache_config.user_specified_block_size = True", "pass"),
    ],
    "tests/unit/models/test_kinds.py": [
        ("states of all blocks are the request's", "models.kinds:LinearAttention.held", "max(0, blocks - 1)", "0"),
        ("a state grows with its context", "models.kinds:LinearAttention.bytes_held", "self.slot_bytes if tokens else 0", "self.slot_bytes * tokens"),
    ],
    "tests/engine/test_linear_attention.py::test_states_are_the_sources_byte_for_byte": [
        ("a slot moves in one piece", "kv_transfer.connector:PATConnector.register_kv_caches", "kind.segments(spec, view)", "[view]"),
        ("a segment moves for all", "kv_transfer.connector:PATConnector._views", "(view.storage_offset(), view.shape,", "(view.shape,"),
    ],
    "tests/vllm/patches/test_mamba2.py": [
        ("states from within a step are kept", "patches.linear_attention:end_prompts_parts_with_blocks", "isinstance(layer, MambaMixer2)", "False"),
    ],
    "tests/vllm/weights/test_weights.py": [
        ("kernels read the convolution of another layout", "weights.model_weights:model_weights", "yield Weight(full_name, buffer.data, cuts, _place(module), module, name)", "pass"),
        ("the convolution's view is whole", "weights.model_weights:model_weights", 'cuts = _known_cuts(full_name, module.conv1d, "weight") or ()', "cuts = ()"),
        ("steps of heads have no rule", "weights.model_weights:_known_cuts", '("A", "D", "dt_bias")', '("A", "D")'),
        ("the gated norm is cut in two parts", "weights.model_weights:_partition", "EvenPartition((module.full_hidden_size,))", "EvenPartition((module.full_hidden_size // 2,) * 2)"),
        ("a convolution has no memory when it gets its shape", "weights.inplace:InPlaceShards.building", "last.nbytes <= _SMALL", "False"),
        ("convolutions keep memory that nobody uses", "weights.inplace:InPlaceShards.building", "            for parameter in small:\n                parameter.untyped_storage().resize_(0)\n", ""),
    ],
    "tests/vllm/weights/test_experts.py::test_a_whole_model": [
        ("the convolution is cut as one matrix", "weights.model_weights:model_weights", "sizes = module.key_dim, module.key_dim, module.value_dim", "sizes = (2 * module.key_dim + module.value_dim,)"),
        ("all ranks have the first heads' decay", "weights.model_weights:_place", "return Place(module.tp_size, module.tp_rank)", "return Place(module.tp_size, 0)"),
        ("parameters lose their memory while they get their shape", "weights.inplace:InPlaceShards.building", "            last = parameter", "            last = parameter\n            if last is not None:\n                last.untyped_storage().resize_(0)"),
    ],
    "tests/vllm/patches/test_delta_net.py": [
        ("a convolution does not see the tokens before", "patches.delta_net:_core", "torch.cat([conv, mixed_qkv[start:end]])", "torch.cat([0 * conv, mixed_qkv[start:end]])"),
        ("what is no number stays in a slot", "patches.delta_net:_zeros", "torch.zeros_like(like, dtype=torch.float32)", "like.float() * 0"),
        ("a request begins with what lay in its slot", "patches.delta_net:_core", "torch.Tensor.float if continued[i] else _zeros", "torch.Tensor.float"),
    ],
    "tests/vllm/start/test_bad_input.py": [
        ("rules about linear attention hold for all", "start.refused:unsupported", "(is_linear or not rule.linear)", "True"),
        ("groups of Mamba2 can be copied", "models.layer_sizes:linear_heads", '"mamba2": "n_groups"', '"mamba2": "mamba_num_heads"'),
        ("dense models are mixtures", "start.refused:facts_of", " and may_have_experts(fields)", ""),
        ("key heads that do not divide are noticed by vLLM", "start.prepare:_check_heads", "if key_heads % layout.tp:", "if False:"),
    ],
    "tests/unit/simulator/modelled/test_hardware.py": [
        ("steps read no states", "simulator.modelled.roofline:Machine.step", "memory += 2 * (batch + (prefill > 0)) * model.state_bytes(tp)", "pass"),
        ("states stay behind in modelled switches", "simulator.modelled.roofline:Machine.switch", "live * self.moved_states(source, target)", "0"),
    ],
    "tests/unit/start/test_memory_estimate.py": [
        ("contexts have no slots", "start.memory_estimate:_kv_share", "min(tokens, 2 * block_size)", "0"),
        ("each layout has blocks of its own size", "start.memory_estimate:estimate", "model.block_size(layouts[0].tp, engine.block_size)", "model.block_size(layouts[-1].tp, engine.block_size)"),
    ],
    "tests/unit/models/test_model_size.py": [
        ("experts that no layer has count", "models.layer_sizes:may_have_experts", 'alone is None or "moe" in alone', "True"),
        ("all MLPs have gates", "models.model_size:ModelSize.layer_weights", "matrices = 3 if self.mlp_gate else 2", "matrices = 3"),
        ("queries have no gates", "models.model_size:ModelSize.layer_weights", "(2 + self.gated) * self.heads", "2 * self.heads"),
    ],
})
# fmt: on
