"""The HTTP API's JSON shapes. One dialect of the API (OpenAI, Responses, Anthropic), one folder:
requests are decoded from bytes into typed structs, responses and events are rendered as bytes."""
