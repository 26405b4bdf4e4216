"""Scenarios, the models and caches they run on, and the reference that they are compared with."""
