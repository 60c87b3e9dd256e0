"""The cost model: seconds of an iteration, fitted at start-up and refined while serving."""
