"""A simulated round of a model's recurrent layers: what is run, how it is timed, how it is shown."""
