"""Drafts from what was generated before: earlier responses by prompt, and matching in them. Pure.

`corpus` keeps the responses. `shelf` is what of them a rank has: the rows of its requests. `suffix`
finds what followed the same tokens in them.
"""
