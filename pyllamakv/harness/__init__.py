"""The harness: scenarios, the lab they run in, and the verdict that they lead to."""
