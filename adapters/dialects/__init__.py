"""How models want conversations written: chat templates behind the `ChatTemplate` port."""

from adapters.dialects.loading import load_chat_template

__all__ = ["load_chat_template"]
