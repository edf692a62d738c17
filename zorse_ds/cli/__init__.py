"""The command line `zorse`: each command parses, asks a lower layer for facts and prints them."""

from zorse_ds.cli.program import app, main

__all__ = ["app", "main"]
