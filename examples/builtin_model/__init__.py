"""How the built-in model is made: corpus, training, evaluation."""
