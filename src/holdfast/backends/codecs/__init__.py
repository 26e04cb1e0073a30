"""Codecs: implementations of `base/ports/codec.py`, each for chunks whose bits have something in common.

`wiring` lists them by name; the encoder and the readers see only the port. Read `planes.py` first.
A codec never reads a store, and never touches a byte in Python: numpy and zstd do, without the GIL.
"""
