"""The same engine in virtual time: an event loop, an executor that costs, arrival traces."""
