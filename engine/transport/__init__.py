"""From a `Step` to its `StepResult`: `inline` in this process, `multiprocess` in another."""
