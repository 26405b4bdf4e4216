"""Speak to a built library: in this process, or in a worker of its own."""
