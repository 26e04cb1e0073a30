"""The near tier of a run: which step goes where, and the drain that copies due steps to the root behind training.

`CheckpointManager` calls it. Read `near.py` first.
It never decides which manifests count (`stored/repository/` does) and copies no byte itself (`stored/copying/` does).
"""
