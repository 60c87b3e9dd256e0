"""Scheduling policies by name. A policy only orders requests (`Policy`)."""

from engine.policy.base import Policy
from engine.policy.settings import PolicySettings
from engine.policy.table import POLICIES, RESEARCH, build, levels_of, name_of, settings_of
