"""The engine under random loads and faults, in virtual time, on a device that remembers what each
slot holds: `python -m tests.fuzz.engine FIRST LAST` plays the cases with these seeds."""
