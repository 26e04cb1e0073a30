"""Fuzzes every parser of stored bytes, guided by coverage. `make fuzz` runs it.

`targets` lists the parsers and their properties, `seeds` the first inputs. `one` fuzzes one target for a time,
`__main__` all targets in turn.
"""
