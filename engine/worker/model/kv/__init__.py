"""The KV cache and other states of a stage: tensors, groups, and the pools they are copied to."""
