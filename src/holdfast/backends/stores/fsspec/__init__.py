"""Every file system that fsspec knows, as a slower store: `sftp://`, `hdfs://`, `webhdfs://`, `local://`.

Read `store.py` first. What a file system can do is found by trying it once (`abilities.py`). Nothing here makes a call
again: a wrapper around a store does. The library and its clients are loaded at the first request, never at import.
"""
