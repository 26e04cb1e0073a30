"""One checkpoint, read-only: location, manifest and index, the proof of coverage, verification.

`training/loading/`, `training/runs/`, `offline/` and `open_checkpoint` call it. Read `checkpoint.py` first.
It writes nothing and needs no torch.
"""
