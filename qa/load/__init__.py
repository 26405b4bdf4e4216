"""Load tests: many requests against llama-server, stock and patched, and against `Batcher`."""
