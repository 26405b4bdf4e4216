"""The command line: one module per verb, no logic in them."""
