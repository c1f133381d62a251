"""What Prometheus shows of PAT, through vLLM's own registry."""
