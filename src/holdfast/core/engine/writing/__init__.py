"""Writes packs: straight from the state, from staged windows, through codecs, or from where they lie in memory.

Saving and imports that copy call it. Read `write.py` first.
It decides nothing about packs, and publishes nothing.
"""
