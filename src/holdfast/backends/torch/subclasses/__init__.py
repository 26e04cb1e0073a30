"""Tensor subclasses that keep their elements in inner tensors, such as quantised weights and optimizer state.

They are taken apart for a save; a load fills the inner tensors of the same class. Read `flatten.py` first.
It never imports or runs what a checkpoint names.
"""
