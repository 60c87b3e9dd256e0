"""The data plane on NVIDIA GPUs. Only `engine.worker.device` loads this, when it is asked for."""
