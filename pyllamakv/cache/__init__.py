"""Own a cache for others: who gets which cells, what is kept, and what goes first."""
