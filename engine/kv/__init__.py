"""KV cache bookkeeping in integers, behind `KVManager`; the tensors live in the workers."""
