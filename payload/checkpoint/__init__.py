"""Durable and in-memory checkpoints."""
