"""Models that pool: one vector for a whole text, as embedding models, cross-encoders and classifiers give it."""
