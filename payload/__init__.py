"""PyTorch FSDP training that survives faults: what the training image runs."""
