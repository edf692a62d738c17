"""A step as data: from a plan to one list of instructions for the whole cluster, and its proof."""
