"""Images, audio and video of requests: placeholder ranges and the encoder's cache and budget."""
