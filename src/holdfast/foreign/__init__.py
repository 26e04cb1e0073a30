"""Other systems' checkpoints: readers list their tensors in place, writers lay their files out.

`wiring` picks them; `checkpoint/` and `offline/` use them through `ports/foreign.py`. Each folder is one system.
Nothing found in a file is ever executed.
"""
