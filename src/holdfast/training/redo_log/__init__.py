"""The redo log of a run: records of gradients beside the checkpoints, and the way back to the last recorded step."""
