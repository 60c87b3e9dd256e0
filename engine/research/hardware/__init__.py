"""Accelerators and models whose step times are computed from data sheets (rooflines)."""
