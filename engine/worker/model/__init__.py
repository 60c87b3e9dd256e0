"""The model inside a worker: layers, sharding, ragged layout, KV tensors, data plane."""
