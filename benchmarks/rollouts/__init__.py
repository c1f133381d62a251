"""VeRL's GRPO of a small policy that learns arithmetic, with drafts from earlier responses."""
