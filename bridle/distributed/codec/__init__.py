"""Plans, results and other values of a step as protocol buffers, and back."""
