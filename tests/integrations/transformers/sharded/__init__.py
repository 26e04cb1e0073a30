"""The same training under FSDP2, which Trainer runs on GPUs alone."""
