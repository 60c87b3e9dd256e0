"""Typed questions about one input: OpenAI's `/v1/decisions` and System One's `/v1/systemone`."""
