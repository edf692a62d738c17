"""What things cost: seconds of layers, messages and collectives, bytes of memory. No torch."""
