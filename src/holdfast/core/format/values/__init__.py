"""State that is not tensors, as JSON: encode and decode for a closed set of types.

Saving and `stored/checkpoint/` call it. Read `values.py` first; `docs/values.md` lists the types.
It never looks up a class by a name from a file.
"""
