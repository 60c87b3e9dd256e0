"""One generation request: from a decoded body to engine requests, and from tokens to a response."""
