"""Record the cache operations of a program, play them again, and minimize failures."""
