"""Jinja templates of the Triton kernels (package data, no code)."""
