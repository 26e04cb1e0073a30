"""Frozen nouns of the house: boxes, tensors, shards, plans, manifests, values.

They hold facts and simple geometry. Nothing here reads, writes, waits or knows a framework.
"""
