"""A fleet in virtual time: many replicas of the scheduler behind a router."""
