"""Launchers that start workers elsewhere than on this machine."""
