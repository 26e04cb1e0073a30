"""Trainings under Accelerate."""
