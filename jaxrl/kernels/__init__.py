"""Formulas: arrays in, arrays out."""
