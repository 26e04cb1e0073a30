"""Files of `torch.save`: archives read by ranges, and laid out byte by byte.

`wiring` picks `reader.py` and `writer.py`. Neither needs torch, and no pickle in them is executed.
"""
