"""Images for the README and pages, each drawn by a script from a real run."""
