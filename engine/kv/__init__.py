"""KV cache bookkeeping in integers: block ledger, prefix names, host tier, swapping. No tensors."""
