"""Scheduling policies by name. A policy only orders requests (`Policy`)."""

from engine.policy.port import Policy
from engine.policy.settings import PolicySettings
from engine.policy.table import (
    ORACLES,
    POLICIES,
    build,
    lengths_of,
    levels_of,
    name_of,
    settings_of,
)

__all__ = [
    "ORACLES",
    "POLICIES",
    "Policy",
    "PolicySettings",
    "build",
    "lengths_of",
    "levels_of",
    "name_of",
    "settings_of",
]
