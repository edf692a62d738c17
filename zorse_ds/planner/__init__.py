"""From a cluster and a model to a plan. No torch."""
