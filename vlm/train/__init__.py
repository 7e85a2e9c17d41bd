"""Training of vision-language drafters."""
