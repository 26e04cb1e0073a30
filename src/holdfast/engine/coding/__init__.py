"""Encodes the chunks of coded packs on a few threads, and measures what coding and writing take.

`PackWriter` calls it. Read `encoder.py` first, then `meter.py`.
It never decides what is coded: `plan/coding/` does.
"""
