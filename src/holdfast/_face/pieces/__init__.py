"""Behind `holdfast.pieces`: saves and loads tensors for a caller that has planned already, such as PyTorch's DCP.

`holdfast.pieces` exports the classes. Read `writer.py` first.
It never plans or communicates: bytes, packs, digests and the commit are those of any save.
"""
