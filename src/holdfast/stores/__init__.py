"""Stores: keys to bytes.

Here lie the implementations of `ports.store` and what only they need: key rules, system calls, error translation.
Nothing here knows what the bytes mean, and no store knows another.
"""
