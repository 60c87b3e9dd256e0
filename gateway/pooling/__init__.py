"""Requests whose prompts are pooled: embeddings, scores of pairs of texts, and reranking."""
