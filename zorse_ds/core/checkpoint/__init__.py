"""Checkpoints as data: which file holds which range of which tensor, and how a save is switched in.

A checkpoint is a folder of safetensors files, one a rank, and a manifest. State is keyed by the
name a parameter has in the whole model and cut into ranges of its flattened elements, so that any
plan can read what any plan wrote. Nothing here loads torch.
"""
