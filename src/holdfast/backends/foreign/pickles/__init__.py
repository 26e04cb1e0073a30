"""Reads pickles with a bounded machine of our own, and writes them for a closed set of types.

The readers of torch, DCP and DeepSpeed files call it. Read `reader.py` first.
A name outside `allowlist.py` becomes an opaque object: it is never imported or called.
"""
