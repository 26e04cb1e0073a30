"""Moves bytes as a plan says: fills buffers, hashes chunks, writes packs, reads ranges, places pieces into targets.

Saving, loading, `stored/checkpoint/` and `offline/` call it. Read `stream.py` first, then `read.py`.
The lowest room that starts threads. It never decides what to move: `core/plan/` does.
"""
