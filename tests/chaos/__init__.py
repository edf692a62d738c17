"""Runs that are killed at random instants and must go on as if nothing had happened."""
