"""Request fields that several endpoints share: sampling, scheduling, output constraints."""
