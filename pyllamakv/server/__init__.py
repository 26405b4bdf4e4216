"""Build, run and verify upstream's llama-server."""
