"""The folders of the nodes of a job as one store, with parity beneath the store.

The near tier of a run in the memory of its nodes stands on this store. Read `union.py` first.
No module here opens a socket.
"""
