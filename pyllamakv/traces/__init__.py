"""Record the cache operations of a program, replay them, and minimize failures."""
