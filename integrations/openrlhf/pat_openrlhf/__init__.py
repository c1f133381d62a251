"""OpenRLHF with pat-vllm as its rollout engine: `python -m pat_openrlhf ... --vllm_engine pat`."""
