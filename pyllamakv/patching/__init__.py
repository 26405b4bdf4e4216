"""Patches: read, check, choose, apply strictly, export, and carry over to other releases."""
