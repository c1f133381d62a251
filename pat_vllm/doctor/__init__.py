"""Whether a machine is fit for PAT: the user's engine on a random model, against stock vLLM."""
