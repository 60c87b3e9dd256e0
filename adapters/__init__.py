"""One folder per foreign thing, each behind a port that the engine or the gateway declares."""
