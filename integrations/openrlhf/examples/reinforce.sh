#!/usr/bin/env bash
# REINFORCE with OpenRLHF on a PAT engine that regroups in the middle of every rollout.
#
#   integrations/openrlhf/examples/reinforce.sh [further arguments of OpenRLHF]
#
# Runs on CPU as it stands, with a random model and a toy reward, once the environment is active that
# `make test-openrlhf` makes (.venv-openrlhf). On GPUs: change the lines marked GPU.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../../..
work=${WORK:-$(mktemp -d)}

# GPU: delete this block. It has stand-ins for CUDA, NCCL and GPUs from the tests' support code.
export PYTHONPATH=$root/tests/support/openrlhf_on_cpu${PYTHONPATH:+:$PYTHONPATH}
export DS_ACCELERATOR=cpu MAX_JOBS=2 OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1

# GPU: your model and your prompts, a JSON file or a dataset of the Hugging Face hub.
model=$work/model
prompts=$work/prompts.jsonl
[ -e "$model" ] || pat-vllm random-model "$model" --layers 2 --gain 0.5 --dtype bfloat16
python "$here/prompts.py" "$prompts"

# GPU: the number of GPUs for the rollouts, and leave --vllm.pat out: the predictor then decides
# when to switch. This one goes to one group of 2 when 12 responses are left.
rollout=(
    --vllm_engine pat --vllm.num_engines 1 --vllm.tensor_parallel_size 2
    --vllm.pat '{"policy": {"kind": "schedule", "switch_at": {"12": 2}}}'
    --vllm.gpu_memory_utilization 0.3 # GPU: leave out
    --vllm.enforce_eager              # GPU: leave out
    --vllm.sync_backend gloo          # GPU: leave out
)
training=(
    --actor.num_nodes 1 --actor.num_gpus_per_node 1 # GPU: the GPUs for the training
    --ds.attn_implementation eager                  # GPU: flash_attention_2
    --ds.zero_stage 2
    --actor.adam.lr 1e-2 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 # GPU: 1e-6
    --algo.advantage.estimator reinforce --algo.kl.init_coef 0
    --algo.advantage.is_correction_level token # reports vllm_kl: rollout against training
)
# What a response may still take up of max_len is its limit, as short prompts get long responses.
data=(
    --data.prompt_dataset "$prompts" --data.input_key input --data.label_key label
    --data.max_len 160 --reward.remote_url "$here/reward.py"
    --rollout.batch_size 8 --rollout.n_samples_per_prompt 4
    --rollout.micro_batch_size 8 --train.batch_size 32 --train.micro_batch_size 8
    --train.num_episodes 1 --train.max_epochs 1
    --ckpt.output_dir "$work/trained" --ckpt.path "$work/checkpoints"
)
exec python -m pat_openrlhf "${rollout[@]}" "${training[@]}" \
    --actor.model_name_or_path "$model" "${data[@]}" "$@"
