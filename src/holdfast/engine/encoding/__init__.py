"""Encodes the chunks of coded packs, between their copy out of the state and the write.

Only `engine/writing` calls it. Read `encode.py` first.
It opens no store and writes no file, and never decides what is coded; stored chunks are decoded in `engine/decoding`.
"""
