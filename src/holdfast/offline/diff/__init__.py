"""Diff: what differs between two checkpoints, in tensors and in values.

`api.diff` and `holdfast diff` call it. Read `compare.py` first.
It never reads a chunk whose digests settle the question.
"""
