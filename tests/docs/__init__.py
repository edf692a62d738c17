"""Tests that what the documentation shows is true."""
