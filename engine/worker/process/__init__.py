"""The worker process: its entry point, its message loop, and how a worker is built."""
