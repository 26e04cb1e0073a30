"""DCP with its storage writer and ours: a training for the rig, and what PyTorch's own tests of its storage try."""
