"""Saving and loading the state of a rank: what it holds, files of tensors, and who writes what."""
