"""Tasks of one's own: see docs/task.md."""
