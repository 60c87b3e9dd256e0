"""KV cache bookkeeping in integers, behind `KVCache`; the tensors live in the workers."""
