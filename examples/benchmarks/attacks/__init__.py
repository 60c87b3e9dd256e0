"""The inter-token latency of other clients' streams while one client attacks the server."""
