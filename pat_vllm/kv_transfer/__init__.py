"""Moving KV cache between layouts: the pure plan, vLLM's connector interface, the exchange."""
