"""A toy reward in OpenRLHF's form: how many different characters a text has, modulo 7."""

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    """Rewards of texts (prompt and response), float32 [n]."""
    rewards = torch.tensor([float(len(set(query)) % 7) for query in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
