"""What outlives a request: files, batches and responses, in one SQLite database."""
