"""The scenarios that are shipped: one file each, found by `pyllamakv.verification.discovery`."""
