"""The Anthropic Messages API: request, content blocks and rendered events."""
