"""The data plane inside one worker process. Torch lives here and in adapters, nowhere else."""
