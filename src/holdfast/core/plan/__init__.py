"""Pure decisions: which rank writes what, how it is packed, what a load must read.

`training/`, `stored/checkpoint/` and `offline/` call it. Read `ownership.py` first, then `packing.py` and `reads.py`.
Every result depends on the arguments alone: no clock, no randomness, no I/O, no framework.
"""
