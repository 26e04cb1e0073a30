"""Encodes the chunks of coded packs, between their copy out of the state and the write.

Only `core/engine/writing` calls it. Read `encode.py` first.
No module here opens a store, writes a file or decides which pieces are coded. `core/engine/decoding` decodes chunks.
"""
