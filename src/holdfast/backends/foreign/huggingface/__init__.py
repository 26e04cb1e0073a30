"""Hugging Face: safetensors and `.bin` weights, in one file or several.

`wiring` picks the readers and the writer. Read `safetensors_reader.py` first.
No `.bin` pickle is executed.
"""
