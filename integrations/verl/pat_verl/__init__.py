"""Rollout backend "pat" for verl: pat-vllm engines behind verl's own server and weight push."""
