"""The agent of one node: a process without torch that serves the folder of a near tier to the other nodes.

The starting process hands in the store of the folder. Read `serving.py` first.
The agent never stores a pack that another node sends, and decides nothing about the run.
"""
