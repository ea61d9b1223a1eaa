"""A small hybrid that is trained on what every Python brings: source text of its standard library."""
