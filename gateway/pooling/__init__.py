"""Requests whose prompts are pooled: embeddings, scores of pairs of texts, and reranking;
and decisions, for which the log-probabilities of answers are computed."""
