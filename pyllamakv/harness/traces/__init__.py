"""Scripts and traces: read, play, record, replay, shrink, and take them as scenarios."""
