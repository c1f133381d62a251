"""The `pat-vllm` command. The options of advice and of the doctor are made of `cli.ranges`, so this
file imports nothing."""
