"""Slurm-native training and inference of language models."""

__version__ = "0.1.0"
