"""Plots, diagnostics and advice."""
