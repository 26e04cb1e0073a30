"""One save: collect, fingerprint, agree, plan, deduplicate, stage, write, vote, commit.

`training/runs/` and `api` call it. Read `save.py` first.
A save that fails here leaves nothing visible, and it never ends training.
"""
