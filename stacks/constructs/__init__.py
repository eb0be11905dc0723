"""Constructs: keyword-only typed arguments, and what they made as attributes."""
