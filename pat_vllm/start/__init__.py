"""What becomes of a user's options before workers start."""
