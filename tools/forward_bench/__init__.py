"""A complete forward of a hybrid model with random weights, for calibrating verification costs."""
