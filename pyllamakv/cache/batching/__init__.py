"""Continue several prompts at once, in batches over any cache manager."""
