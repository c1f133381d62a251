"""What is known of models by their configs: kinds of state, sizes, classes."""
