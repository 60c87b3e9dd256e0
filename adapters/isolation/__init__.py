"""Work on what callers send, in another process whose children are limited in time and memory."""
