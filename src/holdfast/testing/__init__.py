"""The suite that every store must pass.

The author of a store subclasses the suite in tests of the author's own. Read `store.py` first.
No module outside this room imports this room.
"""
