"""Coverage-guided fuzzing of everything that parses what is stored; `make fuzz` runs it.

`targets` says what is parsed and what must hold of it, `seeds` where fuzzing begins, `one` fuzzes one target until its
time is over, `__main__` one target after the other.
"""
