"""The engine-core side: one stock vLLM scheduler per replica, routing, and the switch."""
