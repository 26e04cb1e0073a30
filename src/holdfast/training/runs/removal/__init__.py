"""Garbage collection of a run: which steps a policy keeps, which files no kept step needs, and their removal.

`CheckpointManager` and `offline_api` call it. Read `garbage_collection.py` first.
It never deletes a file that a kept step refers to.
"""
