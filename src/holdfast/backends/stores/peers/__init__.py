"""The memory of the other nodes: a client of the agent that serves the folder of one node.

The store over all nodes calls this room. Read `peer.py` first.
Nothing here decodes the bytes of an object, or asks a silent node again.
"""
