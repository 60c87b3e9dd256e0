"""OpenAI's wire shapes: requests decoded straight from the bytes, answers rendered once."""
