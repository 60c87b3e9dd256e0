"""Replicas of one model under random loads, deaths and cancels, in virtual time."""
