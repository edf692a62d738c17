"""One script a question: each prints a table and writes JSON and a picture."""
