"""The options of each command. What they do is imported when they are called."""
