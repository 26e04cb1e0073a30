"""Other systems' checkpoints: readers list their tensors in place, writers lay their files out.

`wiring` picks them; `checkpoint/` and `offline/` use them through `ports/foreign.py`.
Each folder is one system. Read `huggingface/` first, the smallest one.
Nothing in a foreign file is ever executed.
"""
