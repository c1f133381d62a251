"""Profiles of GPUs and models that nobody measured, from public figures. Pure."""
