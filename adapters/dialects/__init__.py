"""How models want conversations written: chat templates behind the `ChatTemplate` port."""

from adapters.dialects.choosing import choose_dialect
from adapters.dialects.loading import load_chat_template

__all__ = ["choose_dialect", "load_chat_template"]
