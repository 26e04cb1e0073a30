"""Reads `torch.save` files by byte ranges, and lays them out byte by byte.

`wiring` picks `reader.py` and `writer.py`. Neither needs torch, and no pickle in them is executed.
"""
