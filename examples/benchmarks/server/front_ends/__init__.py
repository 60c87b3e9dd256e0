"""The HTTP front ends of several servers over an engine that computes nothing."""
