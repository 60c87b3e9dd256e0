"""Replicas: several engines of one model behind one queue."""
