#!/usr/bin/env bash
# GRPO with verl, the layout changing inside each rollout.
#
#   integrations/verl/examples/grpo.sh [verl's arguments]
#
# Runs on CPU as it stands, with a random model and toy data. On GPUs change the lines marked GPU.
set -euo pipefail

here=$(dirname "$(realpath "$0")")
root=$(realpath "$here/../../..")
work=${WORK:-/tmp/pat-verl-grpo}

python "$here/make_toy.py" "$work/toy"

# GPU: delete this block. It stands in for the hardware, and is for CPU only.
source "$root/tests/support/verl_on_cpu/environment.sh"
on_cpu=(
  trainer.device=cpu
  +actor_rollout_ref.model.override_config.attn_implementation=eager
  actor_rollout_ref.model.use_remove_padding=false
  actor_rollout_ref.actor.use_torch_compile=false
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
  actor_rollout_ref.rollout.enforce_eager=true
  ++actor_rollout_ref.rollout.enable_sleep_mode=false
  +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=33554432
  +ray_kwargs.ray_init.num_gpus=2
  ray_kwargs.ray_init.num_cpus=16
  +ray_kwargs.ray_init.include_dashboard=false
  +ray_kwargs.ray_init.object_store_memory=200000000
)

gpus=2                         # GPU: of a node
model=$work/toy/model          # GPU: any dense model
data=$work/toy/train.parquet   # GPU: your data
dtype=float32                  # GPU: bfloat16

# The change to an existing command: name=pat, and all GPUs of the node as
# tensor_model_parallel_size. PAT makes of them as many replicas as serve best.
pat=(
  actor_rollout_ref.rollout.name=pat
  actor_rollout_ref.rollout.tensor_model_parallel_size="$gpus"
)

# GPU: lengths, batch sizes and learning rate of your own.
exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$data" data.val_files="$data" \
  data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=128 \
  data.dataloader_num_workers=0 data.filter_overlong_prompts=false \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=false \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$dtype" \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.dtype="$dtype" \
  actor_rollout_ref.rollout.max_model_len=256 \
  actor_rollout_ref.rollout.max_num_seqs=16 \
  actor_rollout_ref.rollout.max_num_batched_tokens=512 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  actor_rollout_ref.rollout.calculate_log_probs=true \
  reward.custom_reward_function.path="$here/toy_reward.py" \
  reward.custom_reward_function.name=compute_score reward.num_workers=1 \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  trainer.n_gpus_per_node="$gpus" trainer.nnodes=1 \
  trainer.total_training_steps=3 trainer.val_before_train=false trainer.test_freq=-1 \
  trainer.save_freq=-1 trainer.resume_mode=disable 'trainer.logger=[console]' \
  "${pat[@]}" "${on_cpu[@]}" "$@"
