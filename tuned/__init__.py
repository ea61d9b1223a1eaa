"""Tables of tuned configurations, one folder a GPU, and the kernels rendered for them (package data, no code)."""
