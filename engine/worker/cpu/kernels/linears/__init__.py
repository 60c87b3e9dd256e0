"""Linear layers: packed weights times rows, in each format."""
