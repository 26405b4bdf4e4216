"""Replay the prompts of real and generated traffic through `PrefixCache`, and compare policies."""
