"""PyTorch's DCP: read in place and written, Megatron-core's checkpoints among them.

`wiring` picks `reader.py` and `writer.py`. No pickle in `.metadata` is executed.
"""
