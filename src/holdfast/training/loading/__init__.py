"""One load: resolve, request, plan, agree, read or exchange, restore.

`checkpoint_manager` and `api` call it. Read `load.py` first.
No value changes before every rank can load.
"""
