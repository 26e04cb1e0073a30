"""The training under DDP, for the rig, which trains under FSDP2 by itself."""
