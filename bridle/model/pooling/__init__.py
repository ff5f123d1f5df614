"""Pooling models: embedding models, cross-encoders and classifiers, which compute one vector for a whole text."""
