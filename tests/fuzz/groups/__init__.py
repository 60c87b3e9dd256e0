"""Several models under random loads, deaths, cancels and unloads, in virtual time."""
