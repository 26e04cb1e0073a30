"""Trainings and tests with the real Trainer of Transformers."""
