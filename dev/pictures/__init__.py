"""Pictures for README and pages, each drawn by a script from a real run."""
