"""OpenAI's request and response shapes: chat, completions, files, batches, and vLLM's tokenize."""
