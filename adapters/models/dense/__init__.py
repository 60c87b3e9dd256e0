"""Dense decoders, one file for each family."""
