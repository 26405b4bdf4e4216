"""Manage a cache for its users: assign cells, keep prefixes, and evict."""
