"""The API of text-embeddings-inference: embeddings, scores and labels of texts."""
