"""Executors: they run each `Step` and return its `StepResult`.

`inline` runs steps in this process, `multiprocess` in worker processes.
"""
