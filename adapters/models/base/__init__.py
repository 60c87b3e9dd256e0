"""What families of models share: fields of config.json, RoPE, norms, projections, pooling."""
