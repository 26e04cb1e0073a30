"""PyTorch's DCP: checkpoints read in place and written, Megatron-core's among them.

`wiring` picks the reader and the writer. Read `reader.py` first.
No pickle in `.metadata` is executed.
"""
