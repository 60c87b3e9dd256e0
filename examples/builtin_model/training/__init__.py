"""From generated text to a checkpoint directory: template, tokenizer, model, training, export."""
