"""What a cache looks like and what can be counted of it: cells, films, timelines."""
