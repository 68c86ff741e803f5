"""Judging a trained model: validation loss by document, and text it writes."""
