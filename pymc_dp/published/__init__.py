"""Bayesian inference from statistics that were published with privacy noise."""
