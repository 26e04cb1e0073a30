"""Lists DeepSpeed checkpoints in place: ZeRO-1 to 3 and universal folders.

`wiring` picks `reader.py`. Read `reader.py` first, then `listing.py` for the order of work.
It never writes a file.
"""
