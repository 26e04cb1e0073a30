"""Moves bytes, decides which bytes to move, and encodes documents: `engine/`, `plan/` and `format/`.

`stored/`, `training/` and `offline/` call it. Read `plan/` first.
No module here knows a job, a run or an implementation of a store.
"""
