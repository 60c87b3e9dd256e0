"""Groups: the models of a server, each with its workers, its pages and its scheduler."""
