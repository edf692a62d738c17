"""What runs when: the timeline of a step, simulated or measured."""
