"""`podway chat`: a chat session in the terminal."""
