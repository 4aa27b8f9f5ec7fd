"""After the fit: private checks of a model against its records, and comparisons of models."""
