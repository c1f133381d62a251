"""A switch from one layout to another, as the engine core carries it out."""
