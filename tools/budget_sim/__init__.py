"""Parts of simulate_budget: cost models, acceptance, policies, report."""
