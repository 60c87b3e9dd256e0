"""Checks of a checkpoint's and an adapter's files before a worker starts.

They read config files and the headers of safetensors, and import neither torch nor numpy, so that
the server refuses what cannot be served within a second. Workers check everything again, and what
only a family knows.
"""
