# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes with images and videos."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/vllm/scheduler/test_images.py": [
        ("prompts with different images are samples of one", "scheduler.requests:prompt_key", "tokens = (*tokens, *identifiers(request))", "pass"),
        ("samples of one prompt are told apart by numbers", "scheduler.images:identifiers", 'if not feature.identifier.rpartition("-")[0].endswith(f"-{feature.modality}")', ""),
        ("workers do not hear what is evicted", "scheduler.replica:is_empty_step", "        or step.free_encoder_mm_hashes\n", ""),
        ("each scheduler makes a budget", "scheduler.images:Budgets.take", "key not in self._made", "True"),
        ("a runner goes on with embeddings of old weights", "scheduler.replica_set:ReplicaSet._forget_stale_images", "self.executor.reset_encoder_cache()", "pass"),
        ("images of new requests are sent twice", "scheduler.images:encoder_inputs_to_send", "if request.num_preemptions:", "if True:"),
    ],
    "tests/vllm/worker/test_images.py": [
        ("a state takes pixels along", "worker.images:without_data", "replace(feature, data=None)", "feature"),
        ("layouts have embeddings of their own", "patches.runners:share_image_embeddings", "larger[: len(own[key])], larger[: len(shared[key])]", "own[key], shared[key]"),
        ("the first layout's positions are those of all", "patches.runners:threefold_positions_in", "each * most_requests", "each * runner.max_num_reqs"),
        ("a dummy load scales pixels by noise", "patches.weights:kept_input_norms", "buffer.copy_(value)", "pass"),
        ("deepstack is as sleep left it", "worker.images:clear_deepstack", "level.zero_()", "pass"),
    ],
    "tests/vllm/start/test_bad_input.py": [
        ("towers are cut", "start.prepare:_keep_towers_whole", 'mm_encoder_tp_mode = "data"', 'mm_encoder_tp_mode = "weights"'),
        ("any class takes images", "start.refused:_images", " and model.architecture not in SERVED", " and False"),
    ],
    "tests/engine/test_images.py": [
        ("schedulers believe in embeddings of old weights", "scheduler.replica_set:ReplicaSet._forget_stale_images", "self.reset_encoder_cache()", "pass"),
        ("images are not encoded again", "scheduler.replica:Replica.encoder_inputs_to_send", "if self.scheduler.use_v2_model_runner:", "if True:"),
    ],
})
# fmt: on
