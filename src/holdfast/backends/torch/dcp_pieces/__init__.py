"""Tensors and values that a caller has planned already, under names of its own: sources, targets, staged copies.

`holdfast.pieces` calls it. Read `planned.py` first.
It never takes a state apart by itself: `state/` does that.
"""
