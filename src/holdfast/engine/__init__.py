"""Moves bytes as a plan says: fills windows, hashes chunks, writes packs, reads runs, places parts.

Threads live here and nowhere below. What is decided is in `plan/`, what is true in `repository/`.
"""
