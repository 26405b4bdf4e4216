"""Call a built library: in this process, or in a worker process."""
