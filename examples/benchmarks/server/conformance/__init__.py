"""Conformance suites of other projects, run against a server."""
