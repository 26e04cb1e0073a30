"""Describes how other systems cut tensors: patterns of names, affine maps, flat partitions.

The DeepSpeed readers call it. Read `pieces.py` first.
It never opens a file.
"""
