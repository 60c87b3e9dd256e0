"""An in-process client, and checks of responses against the shapes of OpenAI and Anthropic."""
