"""Models that propose drafts for speculation, and how drafts are computed."""
