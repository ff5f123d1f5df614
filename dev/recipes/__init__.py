"""Recipes of `examples/recipes`, measured: each module has one recipe's cases and judges answers to them."""
