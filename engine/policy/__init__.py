"""Scheduling policies by name. A policy only orders requests (`engine.ports.Policy`)."""

from engine.policy.settings import PolicySettings
from engine.policy.table import ORACLES, POLICIES, build, name_of

__all__ = ["ORACLES", "POLICIES", "PolicySettings", "build", "name_of"]
