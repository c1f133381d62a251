"""Drafts from what was generated before: responses by prompt, and matching in them. Pure."""
