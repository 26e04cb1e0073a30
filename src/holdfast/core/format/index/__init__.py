"""The index of a checkpoint: its tensors, pieces and chunks, in columns.

Saving builds it, loading and every reader decode it. Read `index.py` first, then `index_file.py` for the bytes.
An index never opens a file: its caller passes bytes in.
"""
