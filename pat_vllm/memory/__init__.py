"""What layouts take of a device's memory, and of pinned host memory. Pure."""
