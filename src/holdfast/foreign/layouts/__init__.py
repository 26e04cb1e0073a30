"""How other systems cut tensors: patterns of names, affine pieces, flat partitions.

The DeepSpeed readers call it. Read `pieces.py` first.
It never opens a file.
"""
