"""Turn a release and a series of patches into a variant: one library and its manifest."""
