"""Measure how many upstream states need no manual work, and verify a sample of them."""
