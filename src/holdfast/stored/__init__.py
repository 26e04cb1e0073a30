"""The content of a store: one checkpoint read-only, the files of a run, the leases of its writers and readers.

`training/` and `offline/` call it. Read `checkpoint/checkpoint.py` first.
No module here needs torch or a training job.
"""
