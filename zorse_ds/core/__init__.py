"""Frozen decisions and what follows from them: plan, layout, shards and the order of samples."""
