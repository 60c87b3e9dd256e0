"""What is measured, each in one command, with the committed results."""
