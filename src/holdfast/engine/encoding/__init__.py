"""Encodes the chunks of coded packs, between their copy out of the state and the write.

Read `encode.py` first. It opens no store and writes no file: `engine/write.py` does, and decoding is `engine/read.py`.
"""
