"""One checkpoint, read-only: its location, its manifest and index, the proof that pieces cover every tensor.

`loading/`, `runs/`, `offline/` and `open_checkpoint` call it. Read `checkpoint.py` first.
It writes nothing and needs no torch.
"""
