"""LoRA adapters in a worker: PEFT files, the linears they change, and the model with adapters."""
