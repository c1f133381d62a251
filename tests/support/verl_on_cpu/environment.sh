# What verl needs of the environment to run on CPU; to be sourced. Test support only.
support=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
export PYTHONPATH=$support/verl_on_cpu:$support/plain_weights${PYTHONPATH:+:$PYTHONPATH}
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-verl_on_cpu}
export VERL_ENGINE_DEVICE=cuda  # verl registers its FSDP engine for "cuda" only
# Or Ray clears what verl puts into CUDA_VISIBLE_DEVICES of an actor without GPUs.
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
# Ranks of two engines share two cores; a measurement binds those of its one.
export VLLM_CPU_OMP_THREADS_BIND=${BIND:-nobind} VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_NO_USAGE_STATS=1
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
unset CUDA_VISIBLE_DEVICES VLLM_CPU_KVCACHE_SPACE RAY_ADDRESS
