"""Research in virtual time: fleets, leaps over decodes, modelled hardware, policies under study.

`podway simulate`, `podway plan` and benchmarks use it. The server imports nothing from here.
"""
