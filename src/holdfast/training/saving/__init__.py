"""One save: collect, fingerprint, agree, plan, deduplicate, stage, write, vote, commit.

`training/runs/` and `api` call this room. Read `save.py` first.
A failed save leaves no visible checkpoint, and never ends training.
"""
