"""Checkpoints of other systems: listed where they lie, and written for them."""
