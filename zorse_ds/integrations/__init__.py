"""The only code that knows other products."""
