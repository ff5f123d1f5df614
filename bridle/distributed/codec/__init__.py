"""Converts step plans, step results and other values of a step to protocol buffers, and back."""
