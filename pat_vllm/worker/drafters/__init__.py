"""Drafters that look into earlier responses, too, in the place of vLLM's n-gram drafters."""
