"""The scenarios: one small file each, found by `pyllamakv.harness.scenario.discover`."""
