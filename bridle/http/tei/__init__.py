"""The API of text-embeddings-inference: vectors, scores and labels of texts."""
