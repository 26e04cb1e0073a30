"""Diff: what differs between two checkpoints, in tensors and in values.

Read `compare.py` first. It reads only chunks whose digests do not settle the question.
"""
