"""Reads `torch.save` files by byte ranges, and lays them out byte by byte.

`wiring` picks the reader and the writer. Read `reader.py` first.
Neither needs torch, and no pickle in them is executed.
"""
