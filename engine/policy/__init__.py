"""Scheduling policies by name. A policy only orders; see `engine.ports.Policy`."""

POLICIES: dict[str, str] = {
    "fcfs": "engine.policy.fcfs:FirstComeFirstServed",
}
