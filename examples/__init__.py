"""What a user learns from (numbered), what is measured (benchmarks) and the built-in model."""
