"""State that is not tensors, as JSON: encode and decode for a closed set of types.

Read `values.py` first; `docs/values.md` lists the types. No class is ever looked up by a name from a file.
"""
