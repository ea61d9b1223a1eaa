"""Code generation and tuning: recurrence specs to rendered kernels to tables. Never imported by a serving process."""
