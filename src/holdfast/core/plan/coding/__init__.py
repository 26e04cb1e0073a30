"""Pure decisions about codecs: which kinds of tensors are coded, by which codec, and which tensors form pairs.

Saving calls it before it plans packs. Read `choice.py` first.
Every result depends on the arguments alone: it never measures, encodes or reads anything.
"""
