"""The `pat-vllm` command, whose program is in `app`."""
