"""Images, audio and video in requests: their positions in the prompt, and the cache and budget of the encoder."""
