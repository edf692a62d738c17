"""One rank's work in torch: executes its program and knows a plan, nothing else."""
