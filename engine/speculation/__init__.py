"""Speculative decoding: drafts of next tokens, which a step verifies (`StepEntry.num_drafts`)."""
