"""Measures the recipes of `examples/recipes`. Each module contains the cases of one recipe, and judges answers
to them."""
