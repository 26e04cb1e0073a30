"""DeepSpeed: ZeRO-1 to 3 and universal folders, read in place.

`wiring` picks `reader.py`; `listing.py` shows the order of work. It writes nothing.
"""
