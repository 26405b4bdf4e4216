"""Serve a model to clients of the OpenAI API, with `AsyncBatcher` over `PrefixCache`."""
