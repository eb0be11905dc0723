"""Recovery arms."""
