"""Measuring layers and links on the devices at hand."""
