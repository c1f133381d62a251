"""What verl adds to the engine's workers."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout import utils
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from pat_vllm.worker.weight_updates import run_in_every_layout

# It masks the ids beyond the tokenizer's on the model object, of which each layout has its own.
run_in_every_layout("monkey_patch_model")

# verl has Linux kill a worker when what has started it ends. That is a thread, and vLLM 0.33 starts
# workers from threads that end as soon as all have started. PAT's workers watch their parent
# themselves (`exit_when_orphaned`).
utils.set_death_signal = lambda: None


class PatWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension; importing it makes it reach every layout where it has to."""
