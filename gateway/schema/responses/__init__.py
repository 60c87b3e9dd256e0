"""The Responses API: request, items and rendered events."""
