"""Tensor subclasses that keep their elements in inner tensors, such as quantised weights and optimizer state.

They are taken apart with `__tensor_flatten__` for a save; a load fills the inner tensors of the same class. The
optimizers' state and the walk over a state are in rooms of their own. Start with `flatten.py`.
"""
