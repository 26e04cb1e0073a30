"""The main job of Holdfast, shown: train, die in the middle of a save, resume on three layouts.

A demonstration for people and for the continuous integration; no part of the package.
"""
