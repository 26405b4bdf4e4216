"""Drive a loaded library: models, contexts, sequences, and the cache that they share."""
