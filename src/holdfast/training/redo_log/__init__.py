"""The redo log of a run: the gradients of each step beside the checkpoints, and the way back to the last recorded step.

A room above `runs`, which knows nothing of the log. Read `redo_log.py` first, then `recovery.py`.
It writes and reads segments through the functions of saves and loads, and never publishes a manifest.
"""
