"""Running a step on a GPU: launching, CUDA graphs, transfers and KV moves."""
