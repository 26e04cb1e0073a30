"""A PyTorch state: walked, taken apart into shards and values, and filled again.

`backends/torch/framework.py` calls it. Read `walk.py` first, then `collect.py` and `restore.py`.
It never touches storage.
"""
