"""`podway plan`: how many GPUs a load needs to keep its latencies within limits."""
