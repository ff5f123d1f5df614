"""Images for the README and the pages; each is drawn by a script from a real run."""
