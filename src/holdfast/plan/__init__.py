"""Pure decisions: who writes what, how it is packed, what a load must read.

Everything here is a function of its arguments: no clock, no chance, no I/O, no framework. What is decided
here is carried out by `engine/` and made true by `repository/`.
"""
