"""Checks that the test command runs and that are not pytest tests."""
