"""Chat templates and dialects: how a model's prompts are formatted and its output is parsed."""

from adapters.dialects.choosing import choose_dialect
from adapters.dialects.loading import load_chat_template

__all__ = ["choose_dialect", "load_chat_template"]
