"""`python -m zorse_ds.cli`: the `zorse` program, for launchers that start modules."""

from zorse_ds.cli.program import main

main()
