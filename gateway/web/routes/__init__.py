"""One file per endpoint: bytes to an order, an order to a response."""
