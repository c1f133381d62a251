"""Whether this machine is fit for PAT: what `pat-vllm doctor` looks at, stage by stage."""
