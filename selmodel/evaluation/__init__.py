"""Evaluation: what a trained model is worth, in numbers that can be compared."""
