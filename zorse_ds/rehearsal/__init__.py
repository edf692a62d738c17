"""Virtual GPUs: real engines on CPU processes with imposed speed, memory and links.

Everything attaches from outside; no engine knows of it.
"""
